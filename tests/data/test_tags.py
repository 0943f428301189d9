"""Generation tags are used where they say what an assistant turn is, and only there."""

import pytest

from tests.data.chats import chat, encode, taught
from tests.data.templates import CHATML, TAGGED, make_tokenizer

TALK = chat(("user", "u"), ("assistant", "a"), ("user", "v"), ("assistant", "b"))
INSIDE = "{% generation %}{{ m['content'] + '<|im_end|>' + '\n' }}{% endgeneration %}"


def tagged(inside: str) -> str:
    assert INSIDE in TAGGED
    return TAGGED.replace(INSIDE, inside)


@pytest.mark.parametrize(
    "inside",
    [
        INSIDE,
        "{% generation %}{{ m['content'] }}{% endgeneration %}{{ '<|im_end|>\n' }}",
        "{%- generation -%}{{ m['content'] + '<|im_end|>' }}{%- endgeneration -%}{{ '\n' }}",
    ],
)
def test_what_lies_inside_the_tags_is_taught_with_its_end_mark(inside: str) -> None:
    tokenizer = make_tokenizer(tagged(inside))
    assert taught(encode(TALK, tokenizer), tokenizer) == ["a<|im_end|>", "b<|im_end|>"]


def test_a_header_inside_the_tags_is_not_taught() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
        "{{ '<|im_start|>assistant\n' + m.content + '<|im_end|>\n' }}{% endgeneration %}"
        "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    tokenizer = make_tokenizer(template)
    assert taught(encode(TALK, tokenizer), tokenizer) == ["a<|im_end|>", "b<|im_end|>"]
    odd = chat(("user", "u"), ("assistant", "<|im_start|>assistant\na"))
    assert taught(encode(odd, make_tokenizer(TAGGED)), tokenizer) == [
        "<|im_start|>assistant\na<|im_end|>"
    ]


@pytest.mark.parametrize(
    "inside",
    [
        # around another text than the answer
        "{{ m['content'] + '<|im_end|>' }}{% generation %}{{ '\n' }}{% endgeneration %}",
        # around the last answer alone
        INSIDE.replace("{% gen", "{% if loop.last %}{% gen")
        + "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}",
        # around the answer without its end mark, and something else behind it
        "{% generation %}{{ m['content'] }}{% endgeneration %}{{ '!<|im_end|>\n' }}",
        # cut apart
        INSIDE.replace(" + '<|im_end|>'", "}}{% endgeneration %}{% generation %}{{'<|im_end|>'"),
    ],
)
def test_tags_that_say_something_else_are_not_believed(inside: str) -> None:
    tokenizer = make_tokenizer(tagged(inside))
    extra = "!" if "!" in inside else ""
    assert taught(encode(TALK, tokenizer), tokenizer) == [
        f"a{extra}<|im_end|>",
        f"b{extra}<|im_end|>",
    ]


def test_tags_around_the_question_are_not_believed() -> None:
    everything = "{% generation %}" + CHATML.split("{% if add")[0] + "{% endgeneration %}"
    asking = "{% if add" + CHATML.split("{% if add")[1]
    row = chat(("user", "u"), ("assistant", "a"))
    for template, learnt in (
        (everything + asking, "a<|im_end|>"),
        (everything, "<|im_start|>assistant\na<|im_end|>"),  # no prompt, so the header is learnt
    ):
        tokenizer = make_tokenizer(template)
        assert taught(encode(row, tokenizer), tokenizer) == [learnt]


def test_the_tags_are_what_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("found by rendering")

    monkeypatch.setattr("megatrain_cli.data.written.find_passages", fail)
    tokenizer = make_tokenizer(TAGGED)
    assert taught(encode(TALK, tokenizer), tokenizer) == ["a<|im_end|>", "b<|im_end|>"]
    with pytest.raises(AssertionError, match="found by rendering"):
        encode(TALK, make_tokenizer(CHATML))
