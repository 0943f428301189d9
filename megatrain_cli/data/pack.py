"""Several documents in a row: which share one, and where each begins.

A pack is a row: what is shuffled, counted, batched and resumed by. Packs are made once for a run,
from the documents' lengths, their order and the row's length alone, so that any process makes the
same ones; each epoch has them in another order. No document is split, and none is left out.

[Note: Window] First-fit decreasing within a window of documents, one window after the other, so
that neither time nor memory grows with more than their number, and documents of a pack are never
far from each other in the order they were given in. A window is long enough that what its last
rows leave empty does not matter.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatrain_cli.data.first_fit import first_fit
from megatrain_cli.errors import InternalError
from megatrain_cli.units import show_number

RULE = "ffd-v1"
"""Names the rule of `pack_documents` in a checkpoint: another rule makes other packs."""

WINDOW = 65_536
"""Documents that are packed together."""


@dataclass(frozen=True)
class Packs:
    """Which documents are in which row.

    Attributes:
        documents: `(num_documents,)` int64, row after row; within a row in the order given.
        offsets: `(num_rows + 1,)` int64: row i is `documents[offsets[i] : offsets[i + 1]]`.
        lengths: `(num_rows,)` int64, tokens of each row.
        capacity: Tokens that a row has room for.
        rows_by_part: Rows of each part of the documents, one part after the other.
    """

    documents: NDArray[np.int64]
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    capacity: int
    rows_by_part: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.lengths)

    def row(self, i: int) -> list[int]:
        """The documents of a row."""
        found: list[int] = self.documents[self.offsets[i] : self.offsets[i + 1]].tolist()
        return found

    def sums(self, values: NDArray[np.int32]) -> NDArray[np.int32]:
        """Of each row, the sum of its documents' values."""
        return np.add.reduceat(values[self.documents], self.offsets[:-1])

    @property
    def efficiency(self) -> float:
        """Share of all places in full rows that hold a token of a document."""
        return int(self.lengths.sum()) / (len(self) * self.capacity)

    def line(self) -> str:
        """What packing came to, for a person."""
        return (
            f"{show_number(len(self.documents), 'document')} packed into "
            f"{show_number(len(self), 'row')} of {show_number(self.capacity, 'token')}, which they "
            f"fill to {self.efficiency:.1%}"
        )


def pack_documents(
    lengths: NDArray[np.int64],
    orders: Sequence[NDArray[np.int64]],
    capacity: int,
    window: int = WINDOW,
) -> Packs:
    """Lay whole documents into rows.

    Args:
        lengths: `(num_documents,)`, tokens of each, from 1 to `capacity`.
        orders: Of each part of the documents, `(n,)`: the order in which windows are cut, counted
            from 0 within the part. Parts follow each other, and share no row. Rows come in the
            order of their first documents.
        capacity: Tokens of a row at most.
        window: Documents that are packed together.
    """
    if not len(lengths) or int(lengths.max()) > capacity or int(lengths.min()) < 1:
        raise InternalError(f"documents that do not fit into rows of {capacity} tokens")
    documents = np.empty(len(lengths), dtype=np.int64)
    begins = np.zeros(len(lengths) + 1, dtype=np.bool_)
    begins[-1] = True
    begin, rows_by_part = 0, []
    for order in orders:
        for first in range(0, len(order), window):
            chosen = begin + order[first : first + window]
            place = slice(begin + first, begin + first + len(chosen))
            documents[place], begins[place] = _pack_window(lengths, chosen, capacity)
        rows_by_part.append(int(np.count_nonzero(begins[begin : begin + len(order)])))
        begin += len(order)
    offsets = np.flatnonzero(begins).astype(np.int64)
    filled = np.add.reduceat(lengths[documents], offsets[:-1])
    return Packs(documents, offsets, filled, capacity, tuple(rows_by_part))


def _pack_window(
    lengths: NDArray[np.int64], chosen: NDArray[np.int64], capacity: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The chosen documents row after row, and which of them begin one."""
    sizes = lengths[chosen]
    by_size = _sorted_places(capacity - sizes, capacity)
    row_of = np.empty(len(chosen), dtype=np.int64)
    row_of[by_size] = first_fit(sizes[by_size].astype(np.int64), capacity)
    # Of each row, the place of its first document: of equal targets the last one written stays.
    places = np.arange(len(chosen))
    first = np.empty(len(chosen), dtype=np.int64)
    first[row_of[::-1]] = places[::-1]
    leader = first[row_of]
    arranged = _sorted_places(leader, len(chosen))
    return chosen[arranged], leader[arranged] == places[arranged]


def _sorted_places(keys: NDArray[np.int64], limit: int) -> NDArray[np.int64]:
    """Places of the keys in ascending order, equal ones as they come; keys are below `limit`."""
    # Of 16 bits NumPy sorts by counting, which is several times faster.
    small = keys.astype(np.uint16) if limit <= 1 << 16 else keys
    return np.argsort(small, kind="stable").astype(np.int64)
