"""Which rows are held out of training, to be evaluated on.

A row's content decides, with the run's seed: a hash of its tokens and of what of them is learnt.
The rows with the lowest hashes are held out. So equal rows are on the same side, and nothing that
is evaluated on was trained on; and a row stays on its side whatever other order, batches or number
of epochs the run has.
"""

from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatrain_cli.data.table import Examples
from megatrain_cli.units import show_count, show_number

HELD_OUT = "lowest-hashes-v1"
"""Names the rule of `hold_out` in a checkpoint: another rule holds out other rows."""


@dataclass(frozen=True)
class Documents:
    """Some rows of a table, or all, in their order.

    Attributes:
        examples: The table.
        ids: `(n,)` int64, which of its rows, ascending; None is all of them.
    """

    examples: Examples
    ids: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.examples) if self.ids is None else len(self.ids)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each, `(n,)`."""
        lengths = self.examples.lengths
        return lengths if self.ids is None else lengths[self.ids]

    @property
    def targets(self) -> NDArray[np.int32]:
        """How many tokens of each are predicted, `(n,)`."""
        targets = self.examples.targets
        return targets if self.ids is None else targets[self.ids]

    def row(self, i: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Token ids and labels of the i-th, as `Examples.row` gives them."""
        return self.examples.row(self.id_of(i))

    def id_of(self, i: int) -> int:
        """The row of the table that is the i-th."""
        return i if self.ids is None else int(self.ids[i])

    def count_tokens(self) -> tuple[int, int]:
        """Tokens of all, and how many of them are targets."""
        return int(self.lengths.sum()), int(self.targets.sum())

    def by_source(self, counts: tuple[int, ...]) -> tuple[int, ...]:
        """How many are of each source; `counts` are those of the table."""
        if self.ids is None:
            return counts
        ends = np.searchsorted(self.ids, np.cumsum(counts))
        return tuple(np.diff(ends, prepend=0).tolist())


def held_out_lines(documents: Documents) -> list[str]:
    """How many rows are held out, and how much is left to learn from; none if none is."""
    total, left = len(documents.examples), len(documents)
    if left == total:
        return []
    num_tokens, num_targets = documents.count_tokens()
    tokens, targets = show_number(num_tokens, "token", show_count), show_count(num_targets)
    return [
        f"{total - left} of them are held out for evaluation",
        f"trained on are {left}: {tokens}, {targets} of them targets",
    ]


def hold_out(examples: Examples, share: float, seed: int) -> tuple[Documents, Documents]:
    """Part a table into rows to train on and rows to evaluate on.

    Args:
        examples: All rows.
        share: Of rows to be held out; at least one is, and rows equal to the last one too.
        seed: Of the run.

    Returns:
        The rows to train on, of which there may be none, and those held out.
    """
    hashes = np.empty(len(examples), dtype=np.uint64)
    offsets = examples.offsets
    for i in range(len(examples)):
        part = slice(offsets[i], offsets[i + 1])
        digest = xxhash.xxh3_64(seed=seed % 2**64)
        digest.update(examples.tokens[part].astype("<i4", copy=False).data)
        digest.update(examples.is_target[part].data)
        hashes[i] = digest.intdigest()
    count = max(1, round(share * len(examples)))
    is_held = hashes <= np.partition(hashes, count - 1)[count - 1]
    return (
        Documents(examples, np.flatnonzero(~is_held).astype(np.int64)),
        Documents(examples, np.flatnonzero(is_held).astype(np.int64)),
    )
