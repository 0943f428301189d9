"""What becomes of rows that cannot be used: an error, or a count of them by reason."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from megatrain_cli.errors import DataError, RowError
from megatrain_cli.units import show_number

OnBadRow = Literal["error", "skip"]

# How many places are kept for one reason.
_NUM_PLACES = 3
# So many rows are looked at before a limit of shares is applied: the first row may be a bad one.
_ENOUGH = 1000


@dataclass(frozen=True)
class SkippedRows:
    """Rows left out for one reason: how many, and where the first of them are."""

    count: int
    places: tuple[str, ...]

    def line(self, reason: str) -> str:
        """The account of them as text."""
        more = ", ..." if self.count > len(self.places) else ""
        return f"skipped {self.count}: {reason} ({', '.join(self.places)}{more})"


@dataclass
class BadRows:
    """Counts the rows of one source; grows while they are read.

    Attributes:
        on_bad_row: `error` raises what it is given.
        limit: Share of the rows read that may be bad.
        num_read: All rows, bad ones included.
        skipped: By reason.
    """

    on_bad_row: OnBadRow = "error"
    limit: float = 0.0
    num_read: int = 0
    skipped: dict[str, SkippedRows] = field(default_factory=dict)

    @property
    def num_bad(self) -> int:
        """Rows that were left out."""
        return sum(rows.count for rows in self.skipped.values())

    def add(self, error: RowError) -> None:
        """Count a bad row; it must be among `num_read` already.

        Raises:
            RowError: `on_bad_row` is "error".
            DataError: More rows are bad than may be.
        """
        if self.on_bad_row == "error":
            raise error
        reason = _general(error.reason)
        _count(self.skipped, reason, 1, (error.where,))
        self._check(max(self.num_read, _ENOUGH))

    def end(self) -> None:
        """All rows were read.

        Raises:
            DataError: More rows are bad than may be.
        """
        self._check(self.num_read)

    def lines(self) -> list[str]:
        """The account as text, a line a reason."""
        return [rows.line(reason) for reason, rows in self.skipped.items()]

    def _check(self, num_rows: int) -> None:
        if self.num_bad > self.limit * num_rows:
            first = (
                f"{self.num_bad} of {show_number(self.num_read, 'row')} cannot be used, more than "
                f"`data.max_bad_share: {self.limit:g}` allows. Mend the file, or raise it."
            )
            raise DataError("\n".join([first, *self.lines()]))


def merge_bad_rows(sources: Iterable[BadRows]) -> dict[str, SkippedRows]:
    """The bad rows of all sources together, by reason."""
    merged: dict[str, SkippedRows] = {}
    for source in sources:
        for reason, rows in source.skipped.items():
            _count(merged, reason, rows.count, rows.places)
    return merged


def _count(
    skipped: dict[str, SkippedRows], reason: str, count: int, places: tuple[str, ...]
) -> None:
    before = skipped.get(reason, SkippedRows(0, ()))
    kept = (*before.places, *places)[:_NUM_PLACES]
    skipped[reason] = SkippedRows(before.count + count, kept)


def _general(reason: str) -> str:
    """A reason without what differs from row to row: positions, columns and quoted words."""
    reason = re.sub(r"\[\d+\]", "[...]", reason)
    reason = re.sub(r" \(column \d+\)", "", reason)
    reason = re.sub(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", "'...'", reason)
    return re.sub(r"\b(item|byte|turn|element) \d+", r"\1 N", reason)
