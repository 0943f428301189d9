"""What is learnt from a chat: every assistant turn with its end mark, once, and nothing else."""

import re
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from megatrain_cli.data.formats import Message, Row
from megatrain_cli.data.template import SkipReason, encode_row, num_targets
from megatrain_cli.errors import DataError
from tests.data.chats import chat, encode, refusal, taught, text
from tests.data.templates import (
    CHATML,
    FAMILIES,
    FORGETFUL,
    NO_END,
    TAGGED,
    TOOLS,
    ZEPHYR,
    make_tokenizer,
)

TOKENIZERS = {
    name: make_tokenizer(template, eos) for name, (template, eos, _, _) in FAMILIES.items()
}


@pytest.mark.parametrize(
    "end", [family for family in FAMILIES if family not in ("gemma", "mistral", "moving", "dated")]
)
def test_roles_are_taken_from_the_row_and_never_from_its_order(end: str) -> None:
    tokenizer, mark = TOKENIZERS[end], FAMILIES[end][2]
    rows = {
        ("assistant", "user", "assistant"): ["t0", "t2"],
        ("user", "user", "assistant"): ["t2"],
        ("user", "system", "assistant"): ["t2"],
        ("system", "user", "assistant", "user"): ["t2"],
        ("user", "assistant", "assistant"): ["t1", "t2"],
    }
    for roles, want in rows.items():
        row = chat(*((role, f"t{i}") for i, role in enumerate(roles)))
        assert taught(encode(row, tokenizer), tokenizer) == [said + mark for said in want]


def test_a_row_that_a_template_refuses_names_its_turn_and_the_reason() -> None:
    tokenizer = TOKENIZERS["gemma"]
    message = refusal(chat(("system", "s"), ("user", "u"), ("assistant", "a")), tokenizer)
    assert message.startswith("train.jsonl:7: turn 1 (system): the chat template refuses it")
    assert "System role not supported" in message
    message = refusal(chat(("user", "u"), ("user", "v"), ("assistant", "a")), tokenizer)
    assert "turn 2 (user)" in message
    assert "must alternate" in message


def test_a_template_without_an_end_mark_is_refused() -> None:
    row = chat(("user", "u"), ("assistant", "a"))
    assert "not learn to stop" in refusal(row, make_tokenizer(NO_END))


def test_a_template_that_cannot_write_a_chat_at_all_is_refused() -> None:
    broken = make_tokenizer("{% for m in messages %}{{ m['text'] + '<|im_end|>' }}{% endfor %}")
    assert "turn 1 (user)" in refusal(chat(("user", "u"), ("assistant", "a")), broken)


@pytest.mark.parametrize(
    "fault", ["{{ 1 / 0 }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ [].pop() }}"]
)
def test_whatever_a_template_fails_with_is_a_refusal(fault: str) -> None:
    message = refusal(chat(("user", "u"), ("assistant", "a")), make_tokenizer(CHATML + fault))
    # Which turn is blamed for endless recursion depends on how deep the stack already is.
    assert re.match(r"train\.jsonl:7: turn \d \(\w+\): the chat template refuses it", message)


def test_text_that_no_tokenizer_can_read_is_refused_wherever_a_template_takes_it_from() -> None:
    row = chat(("user", "u"), ("assistant", "a"), tools=({"name": "\ud800"},))
    template = CHATML.replace("m['content']", "m['content'] + (tools[0].name if tools else '')")
    message = refusal(row, make_tokenizer(template))
    assert message == "train.jsonl:7: chat: half of a surrogate pair, not a character"


def test_a_base_model_takes_texts_and_says_so_of_chats() -> None:
    tokenizer = make_tokenizer(None)
    message = refusal(chat(("user", "u"), ("assistant", "a")), tokenizer)
    assert "train.jsonl:7: the tokenizer has no chat template" in message
    encoded = encode(text("abc"), tokenizer)
    assert tokenizer.decode(encoded.input_ids) == "abc<|im_end|>"
    assert encoded.labels == encoded.input_ids
    assert num_targets(encoded.labels) == 3, "nothing predicts the first token"


def test_a_text_ends_with_one_end_mark() -> None:
    tokenizer = make_tokenizer(None)
    encoded = encode(text("abc<|im_end|>"), tokenizer)
    assert encoded.input_ids.count(tokenizer.eos_token_id) == 1
    assert "no eos_token" in refusal(text("abc"), make_tokenizer(None, eos=None))


def test_marks_that_the_text_and_the_tokenizer_both_write_are_there_once() -> None:
    tokenizer = make_tokenizer(None)
    marks = [(mark, tokenizer.convert_tokens_to_ids(mark)) for mark in ("<s>", "<|im_end|>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A <|im_end|>", special_tokens=marks
    )
    for content in ("abc", "<s>abc", "abc<|im_end|>", "<s>abc<|im_end|>"):
        assert tokenizer.decode(encode(text(content), tokenizer).input_ids) == "<s>abc<|im_end|>"


@pytest.mark.parametrize("pad", [None, "<|im_end|>", "<unk>"])
def test_the_pad_token_changes_no_label(pad: str | None) -> None:
    tokenizer = make_tokenizer(CHATML, pad=pad)
    encoded = encode(chat(("user", "u"), ("assistant", "yes")), tokenizer)
    assert taught(encoded, tokenizer) == ["yes<|im_end|>"]


def test_tool_results_are_read_and_never_taught_and_calls_are() -> None:
    tokenizer = make_tokenizer(TOOLS)
    schema: dict[str, object] = {"name": "look_up", "parameters": {}}
    call: Message = {"role": "assistant", "content": "", "tool_calls": [{"name": "look_up"}]}
    first, *rest = chat(("user", "u"), ("tool", "SECRET42"), ("assistant", "done")).messages
    row = Row("f:1", "messages", messages=(first, call, *rest), tools=(schema,))
    encoded = encode(row, tokenizer)
    assert taught(encoded, tokenizer) == ['[{"name": "look_up"}]<|im_end|>', "done<|im_end|>"]
    shown = tokenizer.decode(encoded.input_ids)
    assert "SECRET42" in shown
    assert '"parameters"' in shown
    assert "None" not in shown


def test_tags_that_leave_the_end_mark_out_still_teach_it() -> None:
    outside = TAGGED.replace(
        "{% generation %}{{ m['content'] + '<|im_end|>' + '\n' }}{% endgeneration %}",
        "{% generation %}{{ m['content'] }}{% endgeneration %}{{ '<|im_end|>\n' }}",
    )
    assert outside != TAGGED
    row = chat(("user", "u"), ("assistant", "a"), ("user", "v"), ("assistant", "b"))
    for template in (TAGGED, outside):
        tokenizer = make_tokenizer(template)
        assert taught(encode(row, tokenizer), tokenizer) == ["a<|im_end|>", "b<|im_end|>"]


@pytest.mark.parametrize("tagged", ["{{ '' }}", "{{ m['content'] }}"])
def test_tags_that_mark_nothing_or_everything_are_not_believed(tagged: str) -> None:
    rest = CHATML.replace("{% for m in messages %}", "").replace("{% endfor %}", "", 1)
    template = (
        "{% for m in messages %}{% generation %}"
        + (rest.split("{% if")[0] if "content" in tagged else tagged)
        + "{% endgeneration %}"
        + ("" if "content" in tagged else rest.split("{% if")[0])
        + "{% endfor %}{% if"
        + rest.split("{% if")[1]
    )
    tokenizer = make_tokenizer(template)
    row = chat(("user", "u"), ("assistant", "a"))
    assert taught(encode(row, tokenizer), tokenizer) == ["a<|im_end|>"]


def test_an_answer_that_melts_into_the_prompt_is_cut_where_a_server_cuts() -> None:
    line_break = "\u010a"  # how a byte-level vocabulary writes it
    merges = ((line_break, line_break),)
    tokenizer = make_tokenizer(ZEPHYR, "</s>", merges=merges, use_regex=False)
    row = chat(("user", "u"), ("assistant", "\na"), ("user", "v"), ("assistant", "b"))
    whole = tokenizer.apply_chat_template(list(row.messages), return_dict=False)
    encoded = encode(row, tokenizer)
    assert encoded.input_ids != whole
    assert tokenizer.decode(encoded.input_ids) == tokenizer.decode(whole)
    assert taught(encoded, tokenizer) == ["\na</s>", "b</s>"]
    prompt = tokenizer.apply_chat_template(
        list(row.messages[:1]), add_generation_prompt=True, return_dict=False
    )
    assert encoded.input_ids[: len(prompt)] == prompt


@pytest.mark.parametrize("template", [CHATML, TAGGED])
@pytest.mark.parametrize("train_on_prompt", [True, False])
@pytest.mark.parametrize("more", [{"tool_calls": [{"name": "f"}]}, {"reasoning_content": "hm"}])
def test_what_a_template_leaves_out_of_an_answer_is_refused_however_it_is_used(
    template: str, train_on_prompt: bool, more: dict[str, object]
) -> None:
    talk = chat(("user", "u"), ("assistant", "a"), ("user", "v"), ("assistant", "b")).messages
    for muted in ({}, {"train": False}):
        messages = (talk[0], {**talk[1], **more, **muted}, *talk[2:])
        row = Row("train.jsonl:7", "messages", messages)
        with pytest.raises(DataError, match=f"turn 2: {next(iter(more))}.*: the chat template"):
            encode_row(row, make_tokenizer(template), 200, "truncate", train_on_prompt)


def test_train_on_prompt_teaches_everything() -> None:
    tokenizer = make_tokenizer(FORGETFUL)  # no turn need be told from another
    row = chat(("user", "u"), ("assistant", "hm</think>a"), ("user", "v"), ("assistant", "b"))
    encoded = encode(row, tokenizer, train_on_prompt=True)
    assert encoded.labels == encoded.input_ids


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (chat(("user", "u")), SkipReason.NO_ANSWER),
        (chat(("user", "u"), ("assistant", "")), SkipReason.EMPTY),
        (chat(("user", "u"), ("assistant", " \n")), SkipReason.EMPTY),
        (text(""), SkipReason.EMPTY),
        (text(" \u2028"), SkipReason.EMPTY),
        (text("<|im_end|>"), SkipReason.ONE_TOKEN),
    ],
)
def test_a_row_with_nothing_to_learn_says_why(row: Row, reason: SkipReason, chatml: Any) -> None:
    assert encode(row, chatml).skipped is reason


@pytest.mark.parametrize("length", [10, 64, 65, 200])
def test_a_long_row_is_cut_dropped_or_refused_as_asked(length: int, chatml: Any) -> None:
    row = text("x" * (length - 1))  # and the end mark
    cut = encode(row, chatml, 64)
    assert (len(cut.input_ids), cut.num_tokens) == (min(length, 64), length)
    assert (cut.input_ids[-1] == chatml.eos_token_id) == (length <= 64), "no invented end mark"
    dropped = encode(row, chatml, 64, overlong="drop")
    assert (dropped.skipped is SkipReason.TOO_LONG) == (length > 64)
    if length > 64:
        message = refusal(row, chatml, max_length=64, overlong="error")
        assert f"{length} tokens and data.max_length is 64" in message
    else:
        assert encode(row, chatml, 64, overlong="error") == cut


def test_a_row_whose_answer_is_cut_away_is_left_out(chatml: Any) -> None:
    row = chat(("user", "x" * 100), ("assistant", "short"))
    assert encode(row, chatml, 64).skipped is SkipReason.CUT_AWAY
    partly = encode(row, chatml, 135)
    assert partly.skipped is None
    assert taught(partly, chatml)[0] == "short<|im_end|>"[: len(taught(partly, chatml)[0])]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        # The prompt of an answer holds what the answer in a chat does not.
        (
            CHATML.replace(
                "+ m['content']", "+ m['content'] + (m.tool_calls or '') | string"
            ).replace("assistant\n' }}", "assistant\n<think>' }}"),
            "turn 2: the chat template is",
        ),
        # Turns that call tools end in another mark, and in one more where they say something too.
        (
            CHATML.replace(
                "+ m['content']", "+ m['content'] + (m.tool_calls or '') | string"
            ).replace(
                "+ '<|im_end|>'", "+ ('<|eot_id|>' if m.tool_calls and m.content else '<|im_end|>')"
            ),
            "turn 2: the chat template ends this turn in another way",
        ),
        # Three turns alone cannot be written, four can.
        (
            "{% if messages | length == 3 %}{{ raise_exception('three') }}{% endif %}"
            + CHATML.replace("+ m['content']", "+ m['content'] + (m.tool_calls or '') | string"),
            "turn 3 (user): the chat template refuses it: three",
        ),
        # One question cannot be written, so the marks of a turn cannot be learnt.
        (
            "{% if messages | length < 3 %}{{ raise_exception('short') }}{% endif %}" + CHATML,
            "cannot write one question and its answer: short",
        ),
    ],
)
def test_a_turn_whose_ends_cannot_be_told_is_refused(template: str, reason: str) -> None:
    called: Message = {"role": "assistant", "content": "a", "tool_calls": [{"name": "f"}]}
    first, _, *rest = chat(
        ("user", "u"), ("assistant", "a"), ("user", "v"), ("assistant", "b")
    ).messages
    row = Row("train.jsonl:7", "messages", (first, called, *rest))
    assert reason in refusal(row, make_tokenizer(template))
