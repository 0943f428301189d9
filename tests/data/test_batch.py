"""Micro-batches hold exactly the rows, and padding is known by its place."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.data.batch import RowArrays, find_pad_id, make_micro_batches
from megatrain_cli.data.formats import Message, Row
from megatrain_cli.data.template import IGNORED, encode_row
from megatrain_cli.errors import InternalError
from tests.data.templates import make_tokenizer

PAD = 0


def make_row(length: int, first: int = 1) -> RowArrays:
    """Token ids with the pad token among them, all of them targets."""
    ids = (np.arange(first, first + length, dtype=np.int64)) % 3
    return ids, ids.copy()


@given(st.lists(st.integers(1, 9), max_size=12), st.integers(1, 4), st.sampled_from([None, 9, 16]))
def test_rows_come_back_out_of_their_micro_batches(
    lengths: list[int], micro_batch_size: int, length: int | None
) -> None:
    rows = [make_row(n, first) for first, n in enumerate(lengths)]
    num_micro = -(-max(1, len(rows)) // micro_batch_size) + 1
    batches = make_micro_batches(rows, micro_batch_size, num_micro, PAD, length, 16)
    assert len(batches) == num_micro
    places = [(batch, i) for batch in batches for i in range(micro_batch_size)]
    for number, (batch, i) in enumerate(places):
        assert batch.input_ids.dtype == batch.labels.dtype == np.int64
        assert batch.input_ids.shape == batch.labels.shape
        assert batch.input_ids.shape[0] == micro_batch_size
        ids, labels = rows[number] if number < len(rows) else make_row(0)
        n = len(ids)
        assert batch.input_ids[i, :n].tolist() == ids.tolist()
        assert batch.labels[i, :n].tolist() == labels.tolist()
        assert (batch.input_ids[i, n:] == PAD).all()
        assert (batch.labels[i, n:] == IGNORED).all()
    for number, batch in enumerate(batches):
        own = lengths[number * micro_batch_size : (number + 1) * micro_batch_size]
        assert batch.input_ids.shape[1] == (length or max(own or lengths or [1]))


@pytest.mark.parametrize("pad", [None, "<|im_end|>", "<unk>"])
def test_the_last_target_of_each_row_is_its_end_mark_whatever_the_pad_token(
    pad: str | None,
) -> None:
    tokenizer: Any = make_tokenizer(pad=pad)
    rows = []
    for said in ("yes", "a longer answer"):
        asked: Message = {"role": "user", "content": "u"}
        answer: Message = {"role": "assistant", "content": said}
        encoded = encode_row(
            Row("f:1", "messages", (asked, answer)), tokenizer, 99, "truncate", False
        )
        rows.append((np.array(encoded.input_ids), np.array(encoded.labels)))
    (batch,) = make_micro_batches(rows, 2, 1, find_pad_id(tokenizer), None, 99)
    for labels in batch.labels:
        targets = labels[labels != IGNORED]
        assert targets[-1] == tokenizer.eos_token_id
        assert (targets == tokenizer.eos_token_id).sum() == 1


def test_a_pad_token_is_always_found() -> None:
    assert find_pad_id(make_tokenizer(pad="<unk>")) == 2
    assert find_pad_id(make_tokenizer(eos="</s>", pad=None)) == 4
    assert find_pad_id(make_tokenizer(eos=None, pad=None)) == 0


def test_rows_that_do_not_fit_are_a_bug() -> None:
    with pytest.raises(InternalError, match="9 tokens was not cut to 8"):
        make_micro_batches([make_row(9)], 1, 1, PAD, None, 8)
    with pytest.raises(InternalError, match="3 rows for 1 micro-batches of 2"):
        make_micro_batches([make_row(1)] * 3, 2, 1, PAD, None, 8)
