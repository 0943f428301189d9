"""Which rows an epoch has where sources have weights: a pure function, like the order of rows.

[Note: what a weight means] A source of n rows and weight w gives `round(w * n)` rows to each epoch,
at least one: the *draws* of the source. Its draws of all epochs are one endless stream of passes,
each with every row once, cut into epochs. So weight 2 has each row twice an epoch, weight 0.5 half
of the rows in one epoch and the other half in the next, and at any time no row of a source was
drawn more than once more often than another. An epoch is the draws of all sources, in one shuffled
order; with all weights 1 it is every row once, in the order of `epoch_order`.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatrain_cli.data.sampler import epoch_order
from megatrain_cli.errors import InternalError

MIXING = "passes-v1"
"""Names the rule of `mixed_order` where a weight is not 1."""

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


def mixed_order(
    num_rows: Sequence[int], weights: Sequence[float], seed: int, epoch: int, *, shuffle: bool
) -> NDArray[np.int64]:
    """The rows of an epoch in order, `(sum(num_draws(...)),)` int64.

    See [Note: what a weight means].

    Args:
        num_rows: By source; rows are counted through all sources, those of the first source first.
        weights: By source, how many times each row is drawn in an epoch, on average.
        seed: Of the run.
        epoch: Counted from 0.
        shuffle: Without it an epoch has the draws of one source after the other, each pass in the
            order of the rows.
    """
    parts, first = [], 0
    draws = num_draws(num_rows, weights)
    for index, (rows, count) in enumerate(zip(num_rows, draws, strict=True)):
        if rows:
            source_seed = (seed + (index + 1) * _SEED_STEP) % 2**64
            parts.append(first + _draws(rows, count * epoch, count, source_seed, shuffle))
        first += rows
    chosen = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
    if not shuffle:
        return chosen
    # Sorted, the choice is every row in its place where all weights are 1.
    chosen.sort()
    return chosen[epoch_order(len(chosen), seed, epoch)]


def _draws(num_rows: int, start: int, count: int, seed: int, shuffle: bool) -> NDArray[np.int64]:
    """Draws `start` to `start + count` of the endless stream of a source's passes."""
    parts = []
    while count:
        index, place = divmod(start, num_rows)
        taken = min(count, num_rows - place)
        # A whole pass has every row, in whatever order; only a part of one has to be chosen.
        if shuffle and taken < num_rows:
            order = epoch_order(num_rows, seed, index)
        else:
            order = np.arange(num_rows, dtype=np.int64)
        parts.append(order[place : place + taken])
        start, count = start + taken, count - taken
    return np.concatenate(parts)
