"""What the numbers of one tensor are like: counts of what should not be there, and its range."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass
class Statistics:
    """Counts and range of a tensor whose values come piece by piece.

    Attributes:
        count: Elements seen.
        nan: NaNs among them.
        infinite: Infinities of either sign.
        negative: Finite values below zero.
        zero: Zeros of either sign.
        smallest: Least finite value; `inf` while there is none.
        largest: Greatest finite value; `-inf` while there is none.
    """

    count: int = 0
    nan: int = 0
    infinite: int = 0
    negative: int = 0
    zero: int = 0
    smallest: float = float("inf")
    largest: float = float("-inf")
    _sum: float = field(default=0.0, repr=False)

    def add(self, values: NDArray[np.float32]) -> None:
        """Take in more values, flat."""
        self.count += values.size
        finite = np.isfinite(values)
        if not finite.all():
            nan = int(np.count_nonzero(np.isnan(values)))
            self.nan += nan
            values = values[finite]
            self.infinite += finite.size - values.size - nan
        if not values.size:
            return
        self.zero += values.size - int(np.count_nonzero(values))
        self.negative += int(np.count_nonzero(values < 0))
        self.smallest = min(self.smallest, float(values.min()))
        self.largest = max(self.largest, float(values.max()))
        # FP64: the sum of a billion FP32 values would lose the small ones.
        self._sum += float(np.abs(values).sum(dtype=np.float64))

    @property
    def is_finite(self) -> bool:
        """Whether there is neither a NaN nor an infinity."""
        return not self.nan and not self.infinite

    @property
    def is_zero(self) -> bool:
        """Whether the tensor has elements and all of them are zero."""
        return 0 < self.count == self.zero

    @property
    def mean_magnitude(self) -> float:
        """Mean of the absolute finite values; 0 where there are none."""
        finite = self.count - self.nan - self.infinite
        return self._sum / finite if finite else 0.0
