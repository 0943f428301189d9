"""Templates by name or file: which tokenizers they fit, and what they teach."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from megatrain_cli.config.kinds import TEMPLATES
from megatrain_cli.data.known import KNOWN, NO_TEMPLATE, use_template
from megatrain_cli.errors import DataError, RowError
from tests.data.chats import chat, encode, refusal, taught
from tests.data.templates import CHATML, GEMMA, LLAMA_3, ZEPHYR, make_tokenizer

ENDS = {
    "chatml": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "mistral": "</s>",
    "phi3": "<|end|>",
    "zephyr": "</s>",
    "alpaca": "</s>",
}
TALK = (("user", "u"), ("assistant", "a"), ("user", "v"), ("assistant", "b"))


def test_the_config_knows_the_same_names() -> None:
    assert set(TEMPLATES) == {*KNOWN, NO_TEMPLATE} == {*ENDS, NO_TEMPLATE}


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_a_named_template_teaches_each_answer_in_one_row(name: str) -> None:
    tokenizer = make_tokenizer(None, "</s>")
    use_template(tokenizer, name)
    lead = " " if name == "mistral" else ""
    encoded = encode(chat(("system", "SYS"), *TALK), tokenizer)
    assert taught(encoded, tokenizer) == [f"{lead}a{ENDS[name]}", f"{lead}b{ENDS[name]}"]
    assert not encoded.rest
    assert "SYS" in tokenizer.decode(encoded.input_ids)


@pytest.mark.parametrize(
    ("name", "same", "end"),
    [("chatml", CHATML, "<|im_end|>"), ("llama3", LLAMA_3, "<|eot_id|>"), ("gemma", GEMMA, "<eos>"),
     ("zephyr", ZEPHYR, "</s>")],
)  # fmt: skip
def test_a_named_template_writes_what_its_family_writes(name: str, same: str, end: str) -> None:
    named, theirs = make_tokenizer(None, end), make_tokenizer(same, end)
    if "bos_token" in same:
        mark = ("<s>", named.convert_tokens_to_ids("<s>"))
        named.backend_tokenizer.post_processor = TemplateProcessing(
            single="<s> $A", special_tokens=[mark]
        )
    use_template(named, name)
    for talk in (TALK, (("user", " u \n"), ("assistant", "\na "))):
        assert encode(chat(*talk), named) == encode(chat(*talk), theirs)


@pytest.mark.parametrize("name", ["alpaca", "gemma", "mistral"])
def test_roles_without_a_place_are_refused_by_turn(name: str) -> None:
    tokenizer = make_tokenizer(None, "</s>")
    use_template(tokenizer, name)
    message = refusal(chat(("user", "u"), ("tool", "t"), ("assistant", "a")), tokenizer)
    assert "turn 2 (tool)" in message
    assert "no place for the role tool" in message
    message = refusal(chat(("user", "u"), ("system", "s"), ("assistant", "a")), tokenizer)
    assert "A system turn can only be the first" in message


def test_a_tokenizer_without_the_marks_is_told_what_would_fit() -> None:
    tokenizer: Any = make_tokenizer(None, eos=None)
    with pytest.raises(DataError, match="has no eos_token"):
        use_template(tokenizer, "alpaca")
    small = make_tokenizer(None, "</s>", special=["<unk>", "<s>", "</s>"])
    with pytest.raises(DataError, match=r"`chatml` does not fit .* no token <\|im_start\|>"):
        use_template(small, "chatml")
    use_template(small, "alpaca")
    assert taught(encode(chat(*TALK), small), small) == ["a</s>", "b</s>"]


def test_a_file_is_used_as_it_is_and_none_puts_the_template_aside(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(None)
    path = tmp_path / "own.jinja"
    path.write_text("\ufeff" + CHATML.replace("im_start", "im_end"), encoding="utf-8")
    use_template(tokenizer, str(path))
    assert taught(encode(chat(*TALK), tokenizer), tokenizer) == ["a<|im_end|>", "b<|im_end|>"]
    use_template(tokenizer, None)
    assert tokenizer.chat_template is not None
    use_template(tokenizer, "none")
    assert "Set `data.template` to chatml" in refusal(chat(*TALK), tokenizer)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "cannot be read: No such file"), (b"\xff\xfe", "not UTF-8: byte 0"), (b" \n", "empty")],
)
def test_a_file_that_is_no_template_is_named(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    path = tmp_path / "own.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=reason) as caught:
        use_template(make_tokenizer(None), str(path))
    assert str(caught.value).startswith(str(path))


def test_a_file_with_a_fault_is_refused_with_the_fault(tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text("{{ strftime_now('%d') }}\n{% for m in messages %}{{ m.content }")
    tokenizer = make_tokenizer(None)
    use_template(tokenizer, str(path))
    with pytest.raises(DataError, match="template is no Jinja template: line 2: ") as caught:
        encode(chat(*TALK), tokenizer)
    assert not isinstance(caught.value, RowError)  # no row is to blame, so none can be skipped
