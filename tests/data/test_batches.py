"""Many rows at once give what each gives alone, errors included."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain_cli.data import tokenise
from megatrain_cli.data.formats import Message, Row
from megatrain_cli.data.template import IGNORED, Encoded, SkipReason, encode_row, encode_rows
from megatrain_cli.errors import DataError, RowError
from tests.data.chats import chat, refusal, text
from tests.data.templates import FAMILIES, FORGETFUL, make_tokenizer
from tests.data.test_sentencepiece import make_metaspace

TOKENIZERS: dict[str, Any] = {
    name: make_tokenizer(*FAMILIES[name][:2]) for name in ("chatml", "gemma", "moving", "tagged")
} | {"forgetful": make_tokenizer(FORGETFUL), "none": make_tokenizer(None)}
TOKENIZERS["metaspace"] = make_metaspace(FAMILIES["zephyr"][0], [("\n", "a")])

words = st.sampled_from(["", " ", "a", "\na", "b</think>c", "x" * 30, "<|im_end|>", "é"])
roles = st.sampled_from(["system", "user", "assistant", "tool"])
rows = st.one_of(
    st.lists(st.tuples(roles, words), min_size=1, max_size=5).map(lambda turns: chat(*turns)),
    words.map(text),
    st.lists(st.integers(0, 400), min_size=1, max_size=4).map(
        lambda ids: Row("t:1", "tokenized", input_ids=tuple(ids))
    ),
    st.tuples(words, words).map(
        lambda pair: Row(
            "p:1",
            "prompt_completion",
            ({"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}),
        )
    ),
)


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
@given(st.lists(rows, max_size=6), st.sampled_from(["truncate", "drop", "error"]), st.booleans())
@settings(max_examples=40)
def test_a_batch_gives_what_its_rows_give(
    name: str, batch: list[Row], overlong: Any, everything: bool
) -> None:
    tokenizer = TOKENIZERS[name]
    alone: list[Encoded | str] = []
    for row in batch:
        try:
            alone.append(encode_row(row, tokenizer, 24, overlong, everything))
        except DataError as error:
            alone.append(str(error))
    found = encode_rows(batch, tokenizer, 24, overlong, everything)
    assert [str(f) if isinstance(f, DataError) else f for f in found] == alone


def given_tokens(*ids: int, labels: tuple[int, ...] | None = None) -> Row:
    return Row("t.jsonl:3", "tokenized", input_ids=ids, labels=labels)


def test_tokens_pass_through(chatml: Any) -> None:
    row = given_tokens(5, 6, 7, labels=(IGNORED, 6, 7))
    encoded = encode_row(row, chatml, 3, "error", False)
    assert (encoded.input_ids, encoded.labels) == ([5, 6, 7], [IGNORED, 6, 7])
    assert encode_row(given_tokens(5, 6), chatml, 3, "error", False).labels == [5, 6]
    assert encode_row(row, chatml, 2, "truncate", False).labels == [IGNORED, 6]
    assert encode_row(row, chatml, 2, "drop", False).skipped is SkipReason.TOO_LONG
    assert encode_row(row, chatml, 3, "error", True).labels == [5, 6, 7]
    nothing = given_tokens(5, 6, labels=(IGNORED, IGNORED))
    assert encode_row(nothing, chatml, 3, "error", False).skipped is SkipReason.NOT_TAUGHT
    assert encode_row(nothing, chatml, 3, "error", True).labels == [5, 6]


def test_tokens_of_another_tokenizer_and_shifted_labels_are_refused(chatml: Any) -> None:
    size = len(chatml)
    assert refusal(given_tokens(5, size), chatml) == (
        f"t.jsonl:3: input_ids: item 2 is {size} and the tokenizer has {size} tokens: the row was "
        "made with another one."
    )
    assert "item 1 is -1" in refusal(given_tokens(-1), chatml)
    shifted = given_tokens(5, 6, 7, labels=(6, 7, IGNORED))
    assert "labels: item 1 is neither -100 nor the token" in refusal(shifted, chatml)


def test_a_prompt_and_its_completion_are_plain_text_without_a_template() -> None:
    tokenizer = make_tokenizer(None)
    row = Row(
        "p:1",
        "prompt_completion",
        ({"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4<|im_end|>"}),
    )
    encoded = encode_row(row, tokenizer, 100, "error", False)
    assert tokenizer.decode(encoded.input_ids) == "2+2=4<|im_end|>"
    assert encoded.labels == [IGNORED] * 4 + encoded.input_ids[4:]
    assert encode_row(row, tokenizer, 100, "error", True).labels == encoded.input_ids


def test_a_start_token_that_the_tokenizer_writes_is_there_once_and_not_learnt() -> None:
    tokenizer = make_metaspace(FAMILIES["zephyr"][0], [])
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer.chat_template = None
    turns: tuple[Message, ...] = (
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": " c"},
    )
    encoded = encode_row(Row("p:1", "prompt_completion", turns), tokenizer, 99, "error", False)
    assert encoded.input_ids == [*tokenizer("ab c")["input_ids"], tokenizer.eos_token_id]
    learnt = [label for label in encoded.labels if label != IGNORED]
    assert tokenizer.convert_ids_to_tokens(learnt)[-2:] == ["c", "</s>"]
    assert encode_row(text("<s>ab"), tokenizer, 99, "error", False).input_ids.count(1) == 1


def test_without_the_check_of_spelling_sentencepiece_would_change_the_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = make_metaspace(FAMILIES["zephyr"][0], [])
    row = chat(("user", "u"), ("assistant", "a"))
    right = encode_row(row, tokenizer, 99, "error", False).input_ids
    assert right == tokenizer.apply_chat_template(list(row.messages), return_dict=False)
    monkeypatch.setattr(tokenise, "_against_whole", lambda item, joined, pieces, tok: pieces)
    assert encode_row(row, tokenizer, 99, "error", False).input_ids != right


def test_the_error_of_a_row_names_its_place_and_reason(chatml: Any) -> None:
    (found,) = encode_rows([text("x" * 99)], chatml, 9, "error", False)
    assert isinstance(found, RowError)
    assert found.where == "train.jsonl:7"
    assert found.reason.startswith("the row has 100 tokens")


def test_a_tokenizer_without_a_fast_form_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_metaspace(FAMILIES["zephyr"][0], [])
    row = chat(("user", "u"), ("assistant", "a"))
    fast = encode_row(row, tokenizer, 99, "error", False)
    monkeypatch.setattr(type(tokenizer), "is_fast", False)
    assert encode_row(row, tokenizer, 99, "error", False) == fast
