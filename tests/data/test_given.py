"""What a template is given: calls as objects, answers without their end marks, and no `train`."""

from typing import Any, cast

import pytest

from megatrain_cli.data.formats import Message, Row
from megatrain_cli.data.given import without_end
from tests.data.chats import chat, encode, refusal, taught
from tests.data.templates import CHATML, DATED, FORGETFUL, GEMMA, TAGGED, TOOLS, make_tokenizer

ASKED: Message = {"role": "user", "content": "u"}


def calling(arguments: object, **more: object) -> Row:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments, **more}}
    answer: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    return Row("train.jsonl:7", "messages", (ASKED, answer))


@pytest.mark.parametrize("arguments", [{"x": 1}, '{"x": 1}', ' {"x":1} '])
def test_arguments_as_json_text_are_given_as_an_object(arguments: object) -> None:
    tokenizer = make_tokenizer(DATED, "<|eot_id|>")
    assert taught(encode(calling(arguments), tokenizer), tokenizer) == [
        '{"name": "f", "parameters": {"x": 1}}<|eot_id|>'
    ]


def test_no_arguments_are_an_empty_object() -> None:
    tokenizer = make_tokenizer(DATED, "<|eot_id|>")
    assert '"parameters": {}' in taught(encode(calling(""), tokenizer), tokenizer)[0]


def test_a_template_that_joins_arguments_to_text_is_given_text() -> None:
    template = CHATML.replace(
        "m['content'] +",
        "m['content'] + (m.tool_calls[0].function.arguments + '!' if m.tool_calls else '') +",
    )
    tokenizer = make_tokenizer(template)
    assert taught(encode(calling({"é": 1}), tokenizer), tokenizer) == ['{"é": 1}!<|im_end|>']


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("{x", "broken JSON"),
        ('{"x": 1, "x": 2}', "an object has the same key twice"),
        ('{"x": NaN}', "a number that is not finite"),
        ('{"x": 1e999}', "a number that is not finite"),
        ("[1]", "is not an object"),
        ([1], "a list where an object is expected"),
        (5, "a number where an object is expected"),
    ],
)
def test_arguments_that_are_no_object_are_refused(arguments: object, reason: str) -> None:
    message = refusal(calling(arguments), make_tokenizer(TOOLS))
    assert message.startswith("train.jsonl:7: turn 2: tool_calls[1].arguments: ")
    assert reason in message


@pytest.mark.parametrize(
    ("calls", "reason"), [("f()", "tool_calls: a list"), (["f()"], "tool_calls[1]: an object")]
)
def test_calls_that_are_no_list_of_objects_are_refused(calls: object, reason: str) -> None:
    answer: Message = {"role": "assistant", "content": "", "tool_calls": calls}
    row = Row("train.jsonl:7", "messages", (ASKED, answer))
    assert f"turn 2: {reason} is expected" in refusal(row, make_tokenizer(TOOLS))


def test_what_a_template_does_not_write_is_refused_by_name() -> None:
    plain = make_tokenizer(CHATML)
    assert "turn 2: tool_calls[1]: the chat template does not write it" in refusal(
        calling({"x": 1}), plain
    )
    first = make_tokenizer(TOOLS.replace("m.tool_calls | tojson", "m.tool_calls[0] | tojson"))
    calls = [
        call
        for x in (1, 2)
        for call in cast("list[object]", calling({"x": x}).messages[1]["tool_calls"])
    ]
    answer: Message = {"role": "assistant", "content": "", "tool_calls": calls}
    assert "turn 2: tool_calls[2]: the chat template does not write it" in refusal(
        Row("train.jsonl:7", "messages", (ASKED, answer)), first
    )
    row = chat(("user", "u"), ("assistant", "a"), tools=({"name": "f"},))
    assert "tools: the chat template does not write them" in refusal(row, plain)
    deaf = make_tokenizer("{% if messages[0].role == 'system' %}{% set messages = messages[1:] %}"
                          "{% endif %}" + CHATML)  # fmt: skip
    row = chat(("system", "SYS"), ("user", "u"), ("assistant", "a"))
    assert "turn 1 (system): the chat template does not write it" in refusal(row, deaf)
    row = chat(("system", "be kind\nbe brief"), ("user", "u"), ("assistant", "a"))
    for part in ("[:5]", ".split('\n')[0]", ".split('\n')[-1]"):
        half = make_tokenizer(
            CHATML.replace(
                "m['content']", f"(m.content{part} if m.role == 'system' else m.content)"
            )
        )
        assert "turn 1 (system): the chat template does not write it, or not all" in refusal(
            row, half
        )


def test_an_answer_that_ends_in_its_end_mark_gets_no_second() -> None:
    tokenizer = make_tokenizer(CHATML)
    for said in ("yes<|im_end|>", "yes<|im_end|><|im_end|> \n"):
        encoded = encode(chat(("user", "u"), ("assistant", said)), tokenizer)
        assert taught(encoded, tokenizer) == ["yes<|im_end|>"]
    assert without_end("say </s> twice ", "</s>") == "say </s> twice "


@pytest.mark.parametrize("template", [CHATML, TAGGED])
def test_a_turn_that_says_train_false_is_read_and_not_taught(template: str) -> None:
    tokenizer: Any = make_tokenizer(template)
    muted: Message = {"role": "assistant", "content": "a", "train": False}
    taught_too: Message = {"role": "assistant", "content": "b", "train": True}
    row = Row("f:1", "messages", (ASKED, muted, ASKED, taught_too))
    encoded = encode(row, tokenizer)
    assert taught(encoded, tokenizer) == ["b<|im_end|>"]
    assert "assistant\na<|im_end|>" in tokenizer.decode(encoded.input_ids)
    shown = "".join(taught(encode(row, tokenizer, train_on_prompt=True), tokenizer))
    assert "a<|im_end|>" not in shown.replace("assistant\n", "")
    assert shown.count("<|im_end|>") == 3


def test_train_false_and_the_prompt_cannot_both_be_kept_where_turns_are_rewritten() -> None:
    thought: Message = {"role": "assistant", "content": "hm</think>a", "train": False}
    row = Row("train.jsonl:7", "messages", (ASKED, thought, ASKED, {**ASKED, "role": "assistant"}))
    message = refusal(row, make_tokenizer(FORGETFUL), train_on_prompt=True)
    assert "cannot both be kept" in message


def test_the_date_is_the_same_on_every_day() -> None:
    tokenizer = make_tokenizer(DATED, "<|eot_id|>")
    encoded = encode(chat(("user", "u"), ("assistant", "a")), tokenizer)
    assert "Today: 26 Jul 2024\n\n" in tokenizer.decode(encoded.input_ids)
    assert tokenizer.chat_template == DATED


def test_a_chat_with_calls_that_is_refused_for_another_reason_says_that_one() -> None:
    row = calling({"x": 1})
    system: Message = {"role": "system", "content": "s"}
    row = Row(row.where, row.format, (system, *row.messages))
    message = refusal(row, make_tokenizer(GEMMA, "<eos>"))
    assert message == (
        "train.jsonl:7: turn 1 (system): the chat template refuses it: System role not supported"
    )


def test_a_result_that_is_written_as_json_is_heard() -> None:
    tokenizer = make_tokenizer(DATED, "<|eot_id|>")
    row = calling({"x": 1})
    result: Message = {"role": "tool", "content": 'say "SECRET42"'}
    done: Message = {"role": "assistant", "content": "done"}
    encoded = encode(Row("f:1", "messages", (*row.messages, result, done)), tokenizer)
    assert taught(encoded, tokenizer)[1:] == ["done<|eot_id|>"]
    assert "SECRET42" in tokenizer.decode(encoded.input_ids)


def test_a_turn_that_cannot_be_written_without_its_calls_has_them_written() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' and not m.content and "
        "not m.tool_calls %}{{ raise_exception('empty') }}{% endif %}{% endfor %}" + TOOLS
    )
    tokenizer = make_tokenizer(template)
    assert '"x": 1' in taught(encode(calling({"x": 1}), tokenizer), tokenizer)[0]


def test_several_templates_of_which_none_is_the_ordinary_one_are_refused() -> None:
    tokenizer = make_tokenizer(None)
    tokenizer.chat_template = {"a": CHATML, "b": TOOLS}
    message = refusal(chat(("user", "u"), ("assistant", "a")), tokenizer)
    assert message.startswith("train.jsonl:7: turn 1 (user): the chat template refuses it")
