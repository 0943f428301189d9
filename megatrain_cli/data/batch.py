"""Rows of one optimizer step as micro-batches: rectangles of tokens, padded on the right.

Padding is known by its place, never by its token: where the pad token is also the end token,
masking by id would take the end of every answer out of the loss, and the model would not learn
to stop. Right padding needs no attention mask: causal attention cannot see it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megatrain_cli.data.template import IGNORED
from megatrain_cli.errors import InternalError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RowArrays = tuple[NDArray[np.int64], NDArray[np.int64]]  # input_ids, labels: both (length,)


@dataclass(frozen=True)
class MicroRows:
    """The tokens of one micro-batch.

    Attributes:
        input_ids: `(B, T)` int64.
        labels: `(B, T)` int64, not shifted; -100 where nothing is learnt, padding included.
        documents: `(B, T)` int32, the number of each token's document within its row; padding
            counts as one more at the end. None where rows are one document each.
    """

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    documents: NDArray[np.int32] | None = None


def find_pad_id(tokenizer: "PreTrainedTokenizerBase") -> int:
    """The token to fill with. Which one does not matter: it is never seen and never learnt."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if isinstance(token, int):
            return token
    return 0


def join(documents: Sequence[RowArrays]) -> RowArrays:
    """Documents one behind the other, as one row."""
    ids, labels = zip(*documents, strict=True)
    return np.concatenate(ids), np.concatenate(labels)


def make_micro_batches(
    rows: Sequence[RowArrays],
    micro_batch_size: int,
    num_micro_batches: int,
    pad_id: int,
    length: int | None,
    max_length: int,
    lengths: Sequence[Sequence[int]] | None = None,
) -> list[MicroRows]:
    """Lay the rows of one optimizer step into micro-batches, in order.

    Args:
        rows: At most `micro_batch_size * num_micro_batches`; the last step of a run may have
            fewer, and is filled with rows of padding that teach nothing, so that every step has
            as many micro-batches of as many rows.
        micro_batch_size: Rows of a micro-batch, B.
        num_micro_batches: Micro-batches of a step.
        pad_id: What to fill with.
        length: T of every micro-batch; None for the longest row of each (of the step, where a
            micro-batch has no row).
        max_length: What rows were cut to.
        lengths: Of each row, the tokens of each of its documents; None for rows of one document.
    """
    limit = max_length if length is None else length
    longest = max((len(ids) for ids, _ in rows), default=1)
    if longest > limit:
        raise InternalError(f"a row of {longest} tokens was not cut to {limit}")
    if len(rows) > micro_batch_size * num_micro_batches:
        raise InternalError(
            f"{len(rows)} rows for {num_micro_batches} micro-batches of {micro_batch_size}"
        )
    batches = []
    for first in range(0, micro_batch_size * num_micro_batches, micro_batch_size):
        own = rows[first : first + micro_batch_size]
        width = length or max((len(ids) for ids, _ in own), default=longest)
        input_ids = np.full((micro_batch_size, width), pad_id, dtype=np.int64)
        targets = np.full((micro_batch_size, width), IGNORED, dtype=np.int64)
        for i, (ids, labels) in enumerate(own):
            input_ids[i, : len(ids)] = ids
            targets[i, : len(labels)] = labels
        documents = None
        if lengths is not None:
            documents = np.zeros((micro_batch_size, width), dtype=np.int32)
            for i, counts in enumerate(lengths[first : first + micro_batch_size]):
                padded = [*counts, width - sum(counts)]
                documents[i] = np.repeat(np.arange(len(padded)), padded)
        batches.append(MicroRows(input_ids, targets, documents))
    return batches
