"""Which rows an epoch has where sources have weights: a pure function, like the order of rows.

[Note: What a weight means] A source of n rows and weight w gives `round(w * n)` rows to each epoch,
at least one: the *draws* of the source. Its draws of all epochs are one endless stream of passes,
each with every row once, cut into epochs. So weight 2 has each row twice an epoch, weight 0.5 half
of the rows in one epoch and the other half in the next, and at the end of an epoch no row of a
source was drawn more than once more often than another. An epoch is the draws of all sources in
one shuffled order. With all weights 1 it is every row once, in the order of `RowStream`.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatrain_cli.data.sampler import rows_at
from megatrain_cli.errors import InternalError

MIXING = "passes-v1"
"""Names the rule of `MixedStream` in a checkpoint, besides that of the order."""

# Odd, so that no two sources of a run share a seed.
_SEED_STEP = 0xD1342543DE82EF95


def num_draws(num_rows: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Rows that each source gives to an epoch; none for a source without rows."""
    if len(num_rows) != len(weights):
        raise InternalError(f"{len(num_rows)} sources and {len(weights)} weights")
    return [
        max(1, round(rows * weight)) if rows else 0
        for rows, weight in zip(num_rows, weights, strict=True)
    ]


class MixedStream:
    """The rows of a run whose sources have weights. Has no state: any place is found alone.

    See [Note: What a weight means]. Rows are counted through all sources, those of the first
    source first.
    """

    def __init__(
        self, num_rows: Sequence[int], weights: Sequence[float], seed: int, shuffle: bool
    ) -> None:
        """Begin.

        Args:
            num_rows: By source.
            weights: By source: how many times each row is drawn in an epoch, on average.
            seed: Of the run.
            shuffle: Without it an epoch has the draws of one source after the other, and each pass
                has the rows in their order.
        """
        self._rows = list(num_rows)
        self._draws = num_draws(num_rows, weights)
        self._first_row = np.cumsum([0, *num_rows])
        self._first_draw = np.cumsum([0, *self._draws])
        self._seed, self._shuffle = seed, shuffle
        if not self.num_rows:
            raise InternalError("a stream of no rows")

    @property
    def num_rows(self) -> int:
        """Rows of one epoch: the draws of all sources."""
        return int(self._first_draw[-1])

    def rows(self, start: int, stop: int) -> list[int]:
        """The rows that are `start`-th to `stop - 1`-th of the run, over all epochs."""
        found: list[int] = []
        while start < stop:
            epoch, first = divmod(start, self.num_rows)
            last = min(self.num_rows, first + stop - start)
            places = np.arange(first, last, dtype=np.int64)
            if self._shuffle:
                places = rows_at(places, self.num_rows, self._seed, epoch)
            found += self._drawn(places, epoch).tolist()
            start += last - first
        return found

    def _drawn(self, places: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        """The rows at places of an epoch's draws, before these are shuffled."""
        rows = np.empty_like(places)
        for index, draws in enumerate(self._draws):
            begin = self._first_draw[index]
            mine = np.flatnonzero((places >= begin) & (places < begin + draws))
            if len(mine):
                stream = places[mine] - begin + draws * epoch
                rows[mine] = self._first_row[index] + self._of_source(index, stream, epoch)
        return rows

    def _of_source(self, index: int, draws: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        """The rows of one source, counted within it, at places of its endless stream."""
        num_rows, per_epoch = self._rows[index], self._draws[index]
        seed = (self._seed + (index + 1) * _SEED_STEP) % 2**64
        passes, places = np.divmod(draws, num_rows)
        for number in np.unique(passes).tolist():
            # A pass that lies within one epoch has every row there, and is shuffled with it.
            begin, end = number * num_rows, (number + 1) * num_rows
            is_whole = begin >= epoch * per_epoch and end <= (epoch + 1) * per_epoch
            if self._shuffle and not is_whole:
                mine = passes == number
                places[mine] = rows_at(places[mine], num_rows, seed, number)
        return places
