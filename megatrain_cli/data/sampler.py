"""Which row comes next: a pure function of the seed, the epoch and the place in the epoch.

The stream of rows is endless and has no state: the g-th row of a run is row `g % n` of epoch
`g // n`, so a resumed run needs one integer, and any number of ranks agree. The order comes from
a hash written out below, not from a library's generator, whose stream may change with a version.

[Note: Jumping in] An epoch's order is a bijection that is computed for one place alone: no table,
so the last of 10 million rows comes as fast as the first. A place p is written as (p // b, p % b)
with a * b just above n; in turn each half is moved by a hash of the other, modulo its own size.
Each such round can be undone, whatever the hash, so all of them are a bijection of a * b places.
One that lands at or above n is sent through again until it lands below: a bijection of n places.
"""

import math
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megatrain_cli.errors import InternalError

ORDER = "feistel-v1"
"""Names the rule of `rows_at` in a checkpoint: another rule is another order."""

# Of each half. Four rounds are enough for a random order in theory; a few more cost nothing here,
# and make up for halves of a few rows.
_ROUNDS = 6

# Places that are looked up at once where all are wanted: they stay in a core's cache.
_CHUNK = 8192

# Of the order that documents are packed in; no run comes that far.
_BEFORE_ALL = 2**63

# SplitMix64: G. Steele, D. Lea, C. Flood, "Fast Splittable Pseudorandom Number Generators",
# OOPSLA 2014; constants of the mixer by D. Stafford (variant 13).
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


class RowOrder(Protocol):
    """The rows of a run in the order they are trained on."""

    @property
    def num_rows(self) -> int:
        """Rows of one epoch."""

    def rows(self, start: int, stop: int) -> list[int]:
        """The rows that are `start`-th to `stop - 1`-th of the run, over all epochs."""


def _mix(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The SplitMix64 output function, element by element; arithmetic is modulo 2^64."""
    keys = keys + _GAMMA
    keys = (keys ^ (keys >> np.uint64(30))) * _MIX_1
    keys = (keys ^ (keys >> np.uint64(27))) * _MIX_2
    return keys ^ (keys >> np.uint64(31))


def rows_at(places: NDArray[np.int64], num_rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Which rows stand at some places of an epoch's shuffled order, `places.shape` int64.

    Over all places from 0 to `num_rows - 1` each row comes once; another order each epoch.
    """
    upper_size = np.uint64(math.isqrt(max(0, num_rows - 1)) + 1)
    lower_size = np.uint64(-(-num_rows // int(upper_size)))
    key = _mix(np.array([seed % 2**64], dtype=np.uint64))
    key = _mix(key + np.uint64(epoch))
    rounds: NDArray[np.uint64] = np.arange(2 * _ROUNDS, dtype=np.uint64)
    keys = _mix(key + rounds)

    def shuffle(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        upper, lower = values // lower_size, values % lower_size
        for i in range(0, 2 * _ROUNDS, 2):
            upper = (upper + _mix(lower + keys[i]) % upper_size) % upper_size
            lower = (lower + _mix(upper + keys[i + 1]) % lower_size) % lower_size
        return upper * lower_size + lower

    found = shuffle(places.astype(np.uint64))
    while len(outside := np.flatnonzero(found >= np.uint64(num_rows))):
        found[outside] = shuffle(found[outside])
    return found.astype(np.int64)


def packing_order(num_documents: int, seed: int) -> NDArray[np.int64]:
    """The documents as they are packed, `(num_documents,)` int64: in the order of no epoch."""
    order = np.arange(num_documents, dtype=np.int64)
    for first in range(0, num_documents, _CHUNK):
        chunk = order[first : first + _CHUNK]
        chunk[:] = rows_at(chunk, num_documents, seed, _BEFORE_ALL)
    return order


class RowStream:
    """Each row once an epoch, shuffled or in the order of the files. Has no state."""

    def __init__(self, num_rows: int, seed: int, shuffle: bool) -> None:
        if num_rows < 1:
            raise InternalError("a stream of no rows")
        self._num_rows, self._seed, self._shuffle = num_rows, seed, shuffle

    @property
    def num_rows(self) -> int:
        """Rows of one epoch: all that there are."""
        return self._num_rows

    def rows(self, start: int, stop: int) -> list[int]:
        """The rows that are `start`-th to `stop - 1`-th of the run, over all epochs."""
        found: list[int] = []
        while start < stop:
            epoch, first = divmod(start, self._num_rows)
            last = min(self._num_rows, first + stop - start)
            places = np.arange(first, last, dtype=np.int64)
            if self._shuffle:
                places = rows_at(places, self._num_rows, self._seed, epoch)
            found += places.tolist()
            start += last - first
        return found


def rows_of_update(
    order: RowOrder,
    update_index: int,
    rows_per_update: int,
    total_rows: int | None = None,
    first_row: int = 0,
) -> list[int]:
    """The rows of one optimizer step, counted from 0.

    Args:
        order: Of the run.
        update_index: The optimizer step, counted from 0 at `first_row`.
        rows_per_update: Rows of a full step, over all micro-batches.
        total_rows: Where the run ends (`num_epochs` times the rows): the last step may then
            be smaller, and steps after it are empty. None for a run that counts steps.
        first_row: Rows of the run that were taken before, in steps of whatever size.
    """
    start = first_row + update_index * rows_per_update
    stop = start + rows_per_update
    if total_rows is not None:
        stop = min(stop, total_rows)
    return order.rows(start, stop)
