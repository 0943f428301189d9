"""An account of the rows that were read: what became of each."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from megatrain_cli.data.bad_rows import BadRows, OnBadRow, SkippedRows, merge_bad_rows
from megatrain_cli.data.chunks import EncodedChunk
from megatrain_cli.errors import RowError
from megatrain_cli.units import show_count, show_number

# How many places of skipped rows the summary names for one reason.
_NUM_PLACES = 3


@dataclass(frozen=True)
class DataSummary:
    """What became of every row: `num_read` is `num_used` and all that was skipped.

    Attributes:
        formats: By source, the format its rows were read as.
        num_tokens: Of the rows used, after cutting.
        num_targets: Tokens that are predicted and compared.
        num_cut: Rows used that were longer than `max_length`.
        longest: Tokens of the longest row that was tokenised, before cutting.
        max_length: What rows were cut to.
        used_by_source: Examples of each source, in the order of the config.
        num_split: Chats that became several rows, because the template writes earlier turns in
            another way once the chat goes on.
        notes: What else a person should know.
    """

    formats: dict[str, str]
    num_read: int
    num_used: int
    skipped: dict[str, SkippedRows]
    num_tokens: int
    num_targets: int
    num_cut: int
    longest: int
    max_length: int
    used_by_source: tuple[int, ...] = ()
    num_split: int = 0
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """The account as text, a line a fact."""
        lines = [f"{file}: read as {found}" for file, found in self.formats.items()]
        left_out = self.num_read - self.num_used
        lines.append(
            f"{show_number(self.num_read, 'row')} read, {self.num_used} used, {left_out} skipped"
        )
        for reason, rows in self.skipped.items():
            lines.append(rows.line(reason))
        if self.num_split:
            lines.append(
                f"{show_number(self.num_split, 'chat')} became several rows each: the chat "
                "template writes earlier turns in another way once a chat goes on"
            )
        if self.num_used:
            share = 100 * self.num_targets / self.num_tokens
            lines.append(
                f"{show_number(self.num_tokens, 'token', show_count)}, "
                f"{show_count(self.num_targets)} of them "
                f"targets ({share:.0f} %)"
            )
        cut = f"; {self.num_cut} cut to data.max_length {self.max_length}" if self.num_cut else ""
        lines.append(f"longest row {show_number(self.longest, 'token')}{cut}")
        return [*lines, *self.notes]

    def to_json(self) -> dict[str, object]:
        """For a file."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, object], names: Mapping[str, str]) -> "DataSummary":
        """Of what `to_json` gave, with sources under the names that they have now.

        Args:
            values: As written.
            names: The name of a source when it was written -> its name now.
        """
        made = cls(**values)  # type: ignore[arg-type]  # the caller has proved that we wrote it
        skipped = {
            reason: SkippedRows(rows["count"], tuple(_renamed(p, names) for p in rows["places"]))
            for reason, rows in values["skipped"].items()  # type: ignore[attr-defined]
        }
        return replace(
            made,
            formats={names[name]: found for name, found in made.formats.items()},
            skipped=skipped,
            used_by_source=tuple(made.used_by_source),
            notes=tuple(_renamed(note, names) for note in made.notes),
        )


def _renamed(text: str, names: Mapping[str, str]) -> str:
    """A place, or what begins with one, of a source that may lie elsewhere now."""
    # The longest name that fits: a source may lie in the folder that is another one.
    for old in sorted(names, key=len, reverse=True):
        if text.startswith((f"{old}:", f"{old}/")):
            return names[old] + text[len(old) :]
    return text


@dataclass
class Tally:
    """Counts rows while they are prepared; chunks come in their order.

    Args:
        names: Of all sources.
        on_bad_row: What a bad row does.
        max_bad_share: Of a source's rows.
    """

    names: Sequence[str]
    on_bad_row: OnBadRow
    max_bad_share: float
    num_used: int = 0
    num_split: int = 0
    num_cut: int = 0
    longest: int = 0
    formats: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._bad = [BadRows(self.on_bad_row, self.max_bad_share) for _ in self.names]
        self._examples = [0] * len(self.names)
        self._skipped: dict[str, SkippedRows] = {}

    @property
    def num_read(self) -> int:
        """Rows so far."""
        return sum(bad.num_read for bad in self._bad)

    def add(self, chunk: EncodedChunk) -> None:
        """Count a chunk.

        Raises:
            DataError: A row of it cannot be used, and that is one too many.
        """
        bad = self._bad[chunk.source]
        before = bad.num_read
        for number, fault in chunk.faults:
            bad.num_read = before + number
            error = fault.error()
            if not isinstance(error, RowError):
                raise error
            bad.add(error)
        bad.num_read = before + chunk.num_read
        if chunk.last:
            bad.end()
        if chunk.format is not None:
            self.formats[self.names[chunk.source]] = chunk.format
        self._examples[chunk.source] += len(chunk.lengths)
        self.num_used += chunk.num_used
        self.num_split += chunk.num_split
        self.num_cut += chunk.num_cut
        self.longest = max(self.longest, chunk.longest)
        for reason, where in chunk.skipped:
            so_far = self._skipped.get(reason, SkippedRows(0, ()))
            places = (*so_far.places, where)[:_NUM_PLACES]
            self._skipped[reason] = SkippedRows(so_far.count + 1, places)

    def summary(self, num_tokens: int, num_targets: int, max_length: int) -> DataSummary:
        """The whole account."""
        return DataSummary(
            formats=self.formats,
            num_read=self.num_read,
            num_used=self.num_used,
            skipped=self._skipped | merge_bad_rows(self._bad),
            num_tokens=num_tokens,
            num_targets=num_targets,
            num_cut=self.num_cut,
            longest=self.longest,
            max_length=max_length,
            used_by_source=tuple(self._examples),
            num_split=self.num_split,
            notes=tuple(self.notes),
        )
