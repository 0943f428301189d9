"""What becomes of rows that cannot be used: an error, or a count of them by reason."""

import re
from dataclasses import dataclass, field
from typing import Literal

from megatrain_cli.errors import DataError, RowError

OnBadRow = Literal["error", "skip"]

# How many places are kept for one reason.
_NUM_PLACES = 3
# So many rows are looked at before a limit of shares is applied: the first row may be a bad one.
_ENOUGH = 1000


@dataclass
class BadRows:
    """Counts the rows of one source; grows while they are read.

    Attributes:
        on_bad_row: `error` raises what it is given.
        limit: Share of the rows read that may be bad.
        num_read: All rows, bad ones included.
        counts: By reason, how many rows, and the places of the first of them.
    """

    on_bad_row: OnBadRow = "error"
    limit: float = 0.0
    num_read: int = 0
    counts: dict[str, tuple[int, tuple[str, ...]]] = field(default_factory=dict)

    @property
    def num_bad(self) -> int:
        """Rows that were left out."""
        return sum(count for count, _ in self.counts.values())

    def add(self, error: RowError) -> None:
        """Count a bad row; it must be among `num_read` already.

        Raises:
            RowError: `on_bad_row` is "error".
            DataError: More rows are bad than may be.
        """
        if self.on_bad_row == "error":
            raise error
        reason = _general(error.reason)
        count, places = self.counts.get(reason, (0, ()))
        self.counts[reason] = (count + 1, (*places, error.where)[:_NUM_PLACES])
        self._check(max(self.num_read, _ENOUGH))

    def end(self) -> None:
        """All rows were read.

        Raises:
            DataError: More rows are bad than may be.
        """
        self._check(self.num_read)

    def lines(self) -> list[str]:
        """The account as text, a line a reason."""
        lines = []
        for reason, (count, places) in self.counts.items():
            more = ", ..." if count > len(places) else ""
            lines.append(f"skipped {count}: {reason} ({', '.join(places)}{more})")
        return lines

    def _check(self, num_rows: int) -> None:
        if self.num_bad > self.limit * num_rows:
            raise DataError(
                "\n".join(
                    [
                        f"{self.num_bad} of {self.num_read} rows cannot be used, more than "
                        f"`data.max_bad_share: {self.limit:g}` allows. Mend the file, or raise it.",
                        *self.lines(),
                    ]
                )
            )


def _general(reason: str) -> str:
    """A reason without what differs from row to row: positions, columns and quoted words."""
    reason = re.sub(r"\[\d+\]", "[...]", reason)
    reason = re.sub(r" \(column \d+\)", "", reason)
    reason = re.sub(r"'(?:[^'\\]|\\.)*'", "'...'", reason)
    return re.sub(r"\b(item|byte|turn|element) \d+", r"\1 N", reason)
