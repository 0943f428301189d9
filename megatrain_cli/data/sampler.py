"""Which row comes next: a pure function of the seed, the epoch and the place in the epoch.

The stream of rows is endless and has no state: the g-th row of a run is row `g % n` of epoch
`g // n`, so a resumed run needs one integer, and any number of ranks agree. The order comes from
a hash written out below, not from a library's generator, whose stream may change with a version.
"""

import numpy as np
from numpy.typing import NDArray

from megatrain_cli.errors import InternalError

ORDER = "splitmix64-v1"
"""Names the rule of `epoch_order` in a checkpoint: another rule is another order."""

# SplitMix64: G. Steele, D. Lea, C. Flood, "Fast Splittable Pseudorandom Number Generators",
# OOPSLA 2014; constants of the mixer by D. Stafford (variant 13).
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def _mix(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The SplitMix64 output function, element by element; arithmetic is modulo 2^64."""
    keys = keys + np.uint64(_GAMMA)
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(_MIX_1)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(_MIX_2)
    return keys ^ (keys >> np.uint64(31))


def epoch_order(num_rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """A shuffled order of all rows, `(num_rows,)` int64: each row once, another order each epoch.

    Rows are sorted by `mix(index + mix(epoch + mix(seed)))`; equal keys keep the rows' order.
    """
    key = _mix(np.array([seed % 2**64], dtype=np.uint64))
    key = _mix(key + np.uint64(epoch))
    indices: NDArray[np.uint64] = np.arange(num_rows, dtype=np.uint64)
    return np.argsort(_mix(key + indices), kind="stable").astype(np.int64)


class RowStream:
    """The rows of a run in the order they are trained on.

    Remembers one epoch's order; that is a cache, not a state: any row may be asked for.
    """

    def __init__(self, num_rows: int, seed: int, shuffle: bool) -> None:
        if num_rows < 1:
            raise InternalError("a stream of no rows")
        self.num_rows = num_rows
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        self._order = np.arange(num_rows, dtype=np.int64)

    def row(self, g: int) -> int:
        """The row that is the g-th of the run, counted from 0 over all epochs."""
        epoch, place = divmod(g, self.num_rows)
        if self._shuffle and epoch != self._epoch:
            self._order = epoch_order(self.num_rows, self._seed, epoch)
            self._epoch = epoch
        return int(self._order[place])

    def rows_of_update(
        self,
        update_index: int,
        rows_per_update: int,
        total_rows: int | None = None,
        first_row: int = 0,
    ) -> list[int]:
        """The rows of one optimizer step, counted from 0.

        Args:
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
        return [self.row(g) for g in range(start, stop)]
