"""Templates that write a turn in another way once the chat goes on: each turn as it is served."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megatrain_cli.data import said, turns
from megatrain_cli.data.formats import Message, Row
from megatrain_cli.data.source import SourceFile
from megatrain_cli.data.template import SkipReason
from tests.data.chats import chat, encode, refusal, served, taught, taught_by_row
from tests.data.loading import load_examples
from tests.data.templates import (
    CHANNELS,
    CHATML,
    FORGETFUL,
    MOVING,
    REASONER,
    THINKING,
    make_tokenizer,
)

TALK = (("user", "u"), ("assistant", "hm</think>a"), ("user", "v"), ("assistant", "b"))


def test_a_chat_whose_earlier_turns_change_becomes_a_row_for_each() -> None:
    tokenizer = make_tokenizer(FORGETFUL)
    encoded = encode(chat(*TALK), tokenizer)
    assert taught_by_row(encoded, tokenizer) == [["hm</think>a<|im_end|>"], ["b<|im_end|>"]]
    first, second = (tokenizer.decode(part.input_ids) for part in (encoded, *encoded.rest))
    assert first == "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\nhm</think>a<|im_end|>\n"
    assert "hm</think>" not in second, "the second answer is learnt behind what a server shows"


def test_a_chat_in_which_nothing_changes_is_one_row() -> None:
    tokenizer = make_tokenizer(FORGETFUL)
    plain = chat(("user", "u"), ("assistant", "a"), ("user", "v"), ("assistant", "b"))
    assert taught_by_row(encode(plain, tokenizer), tokenizer) == [["a<|im_end|>", "b<|im_end|>"]]


def test_each_row_begins_with_the_prompt_that_a_server_gives() -> None:
    for template in (FORGETFUL, MOVING, THINKING, CHANNELS):
        tokenizer = make_tokenizer(template, "</s>" if template is MOVING else "<|im_end|>")
        row = chat(("system", "s"), *TALK)
        for part in (encoded := encode(row, tokenizer), *encoded.rest):
            learnt = [i for i, label in enumerate(part.labels) if label != -100]
            prompt = part.input_ids[: learnt[0]]
            assert prompt in served(row, tokenizer), template


def test_a_moved_system_text_is_learnt_behind_where_it_stands() -> None:
    tokenizer = make_tokenizer(MOVING, "</s>")
    row = chat(
        ("system", "SYS"), ("user", "u"), ("assistant", "a"), ("user", "v"), ("assistant", "b")
    )
    encoded = encode(row, tokenizer)
    shown = [tokenizer.decode(part.input_ids) for part in (encoded, *encoded.rest)]
    assert shown == [
        "<s>[INST] SYS\n\nu[/INST] a</s>",
        "<s>[INST] u[/INST] a</s>[INST] SYS\n\nv[/INST] b</s>",
    ]
    assert taught_by_row(encoded, tokenizer) == [[" a</s>"], [" b</s>"]]


def test_an_empty_thought_is_part_of_the_prompt_and_a_real_one_is_learnt() -> None:
    tokenizer = make_tokenizer(THINKING)
    assert taught(encode(chat(("user", "u"), ("assistant", "a")), tokenizer), tokenizer) == [
        "a<|im_end|>"
    ]
    thought = chat(("user", "u"), ("assistant", "<think>\nhm\n</think>\n\na"))
    wanted = ["<think>\nhm\n</think>\n\na<|im_end|>"]
    assert taught(encode(thought, tokenizer), tokenizer) == wanted
    apart: Message = {"role": "assistant", "content": "a", "reasoning_content": "hm"}
    row = Row("f:1", "messages", (chat(("user", "u")).messages[0], apart))
    assert taught(encode(row, tokenizer), tokenizer) == wanted


def test_a_thought_under_two_names_is_learnt_once() -> None:
    tokenizer = make_tokenizer(THINKING)
    both: Message = {
        "role": "assistant",
        "content": "a",
        "reasoning": "h",
        "reasoning_content": "h",
    }
    row = Row("f:1", "messages", (chat(("user", "u")).messages[0], both))
    assert taught(encode(row, tokenizer), tokenizer) == ["<think>\nh\n</think>\n\na<|im_end|>"]


def test_a_thought_without_an_answer_is_learnt() -> None:
    tokenizer = make_tokenizer(THINKING)
    apart: Message = {"role": "assistant", "content": "", "reasoning_content": "hm"}
    row = Row("f:1", "messages", (chat(("user", "u")).messages[0], apart))
    wanted = ["<think>\nhm\n</think>\n\n<|im_end|>"]
    assert taught(encode(row, tokenizer), tokenizer) == wanted


def test_reasoning_that_a_template_would_not_write_is_refused() -> None:
    apart: Message = {"role": "assistant", "content": "a", "reasoning_content": "hm"}
    row = Row("train.jsonl:7", "messages", (chat(("user", "u")).messages[0], apart))
    message = refusal(row, make_tokenizer(CHATML))
    assert message.startswith(
        "train.jsonl:7: turn 2: reasoning_content: the chat template does not"
    )
    again: Message = {**apart, "reasoning_content": "a"}  # the words of the answer
    row = Row("train.jsonl:7", "messages", (row.messages[0], again))
    assert "turn 2: reasoning_content: the chat template does not" in refusal(
        row, make_tokenizer(CHATML)
    )
    lost = chat(("user", "u"), ("assistant", "before<think>hm</think>a"))
    assert "turn 2: content: the chat template does not write it" in refusal(
        lost, make_tokenizer(THINKING)
    )


def test_a_prompt_that_opens_the_reasoning_supplies_the_first_words_of_an_answer() -> None:
    tokenizer = make_tokenizer(REASONER, "</s>")
    row = chat(("user", "u"), ("assistant", "<think>\nhm</think>a"))
    assert taught(encode(row, tokenizer), tokenizer) == ["hm</think>a</s>"]
    message = refusal(chat(("user", "u"), ("assistant", "a")), tokenizer)
    assert message.startswith("train.jsonl:7: turn 2: the chat template is not prefix-preserving")


def test_each_turn_ends_with_the_mark_of_its_kind() -> None:
    tokenizer = make_tokenizer(CHANNELS, "<|return|>")
    call: Message = {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}
    first, *rest = chat(("user", "u"), ("tool", "t"), ("assistant", "a")).messages
    row = Row("f:1", "messages", (first, call, *rest))
    assert taught(encode(row, tokenizer), tokenizer) == ['[{"name": "f"}]<|call|>', "a<|return|>"]
    talk = chat(("user", "u"), ("assistant", "a"), ("user", "v"), ("assistant", "b"))
    assert taught_by_row(encode(talk, tokenizer), tokenizer) == [["a<|return|>"], ["b<|return|>"]]


def test_the_parts_of_a_chat_are_cut_and_counted_by_themselves() -> None:
    tokenizer = make_tokenizer(FORGETFUL)
    row = chat(("user", "u"), ("assistant", "hm</think>a"), ("user", "v" * 90), ("assistant", "b"))
    encoded = encode(row, tokenizer, 60)
    assert encoded.skipped is None
    assert [part.skipped for part in encoded.rest] == [SkipReason.CUT_AWAY]
    assert taught_by_row(encoded, tokenizer)[0] == ["hm</think>a<|im_end|>"]


def test_without_the_check_of_prefixes_a_turn_would_be_learnt_wrongly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = make_tokenizer(FORGETFUL)
    right = taught(encode(chat(*TALK), tokenizer), tokenizer)
    monkeypatch.setattr(turns._Turn, "stands_in", lambda *_: True)
    assert taught(encode(chat(*TALK), tokenizer), tokenizer) != right


def test_without_the_check_of_what_is_said_reasoning_would_be_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (turns, said):
        monkeypatch.setattr(module, "is_said", lambda *_: True)
    tokenizer = make_tokenizer(THINKING)
    lost = chat(("user", "u"), ("assistant", "before<think>hm</think>a"))
    assert "before" not in taught(encode(lost, tokenizer), tokenizer)[0]


def test_parts_that_are_too_long_refuse_the_whole_chat() -> None:
    row = chat(("user", "u" * 90), ("assistant", "hm</think>a"), *TALK[2:])
    message = refusal(row, make_tokenizer(FORGETFUL), max_length=60, overlong="error")
    assert "tokens and data.max_length is 60" in message


def test_chats_that_became_several_rows_are_counted(write: Callable[..., Path]) -> None:
    turns = [{"role": role, "content": content} for role, content in TALK]
    file = write([{"messages": turns}, {"messages": turns[2:]}, {"messages": turns[:1]}])
    examples, summary = load_examples(
        [SourceFile(file)],
        make_tokenizer(FORGETFUL),
        max_length=99,
        overlong="truncate",
        train_on_prompt=False,
    )
    assert len(examples) == 3
    assert (summary.num_read, summary.num_used, summary.num_split) == (3, 2, 1)
    assert any(line.startswith("1 chat became several rows") for line in summary.lines())


def test_answers_at_one_place_are_refused() -> None:
    # Asked for an answer, this one forgets the answer that is there.
    template = (
        "{% if add_generation_prompt and messages[-1].role == 'assistant' %}"
        "{% set messages = messages[:-1] %}{% endif %}" + CHATML
    )
    row = chat(("user", "u"), ("assistant", "a"), ("assistant", "b"))
    assert "writes two answers at one place" in refusal(row, make_tokenizer(template))


def test_a_prompt_that_holds_the_whole_turn_is_refused() -> None:
    closed = CHATML.replace("assistant\n' }}", "assistant\n<|im_end|>\n' }}")
    assert closed != CHATML
    row = chat(("user", "u"), ("assistant", ""), *TALK[2:])
    assert "turn 2: the chat template is not prefix-preserving" in refusal(
        row, make_tokenizer(closed)
    )
