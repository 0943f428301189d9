"""A checkpoint, or all of a run, as tables: what it is, what its files hold, what is wrong."""

from collections.abc import Sequence, Sized
from typing import Protocol

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatrain_cli.report.plan_view import print_table, say
from megatrain_cli.units import show_bytes, show_count


class ShardGroupView(Protocol):
    """Shards in a row that are alike, as far as showing them needs."""

    @property
    def names(self) -> Sequence[str]:
        """In the model's order."""

    @property
    def num_parameters(self) -> int:
        """Of each."""

    @property
    def parts(self) -> Sequence[tuple[str, Sequence[str], int]]:
        """Of each: name of the part, its dtypes, its bytes on disk."""


class CheckpointView(Protocol):
    """One checkpoint, as far as showing it needs. `report` stands beside what reads them."""

    @property
    def summary(self) -> Sequence[tuple[str, str]]:
        """What is known of it, as label and text."""

    @property
    def groups(self) -> Sequence[ShardGroupView]:
        """Its shards."""

    @property
    def notes(self) -> Sequence[str]:
        """What is worth knowing and no fault."""

    @property
    def problems(self) -> Sequence[Exception]:
        """What is wrong, each with one clear line; empty if it is good."""


class CandidateView(Protocol):
    """One row of a run's checkpoints."""

    @property
    def name(self) -> str:
        """Of its folder."""

    @property
    def status(self) -> str:
        """`good`, or what is wrong with it, in a word or two."""

    @property
    def is_picked(self) -> bool:
        """Whether `resume RUN` would take it."""

    @property
    def facts(self) -> Sequence[str]:
        """A text for each of `CANDIDATE_COLUMNS`; empty if it could not be read."""


CANDIDATE_COLUMNS = ("attempt", "bytes", "id")


class WeightFileView(Protocol):
    """One file of a model folder, as far as showing it needs."""

    @property
    def name(self) -> str:
        """Of the file."""

    @property
    def tensors(self) -> Sized:
        """What it holds."""

    @property
    def num_parameters(self) -> int:
        """Elements of all its tensors."""

    @property
    def dtypes(self) -> Sequence[str]:
        """Dtypes that occur."""

    @property
    def num_bytes(self) -> int:
        """On disk."""


class TensorNumbersView(Protocol):
    """What one tensor's values are like, as far as showing it needs."""

    @property
    def name(self) -> str:
        """Of the tensor, as stored."""

    @property
    def texts(self) -> Sequence[str]:
        """A text for each of `NUMBERS_COLUMNS`."""


NUMBERS_COLUMNS = ("min", "max", "mean |x|", "NaN", "Inf", "")


def show_checkpoint(view: CheckpointView, console: Console) -> None:
    """Print one checkpoint: facts, a row for each group of equal shards, notes, problems."""
    summary = Table.grid(padding=(0, 2))
    for label, text in view.summary:
        summary.add_row(Text(label, style="bold"), Text(text))
    print_table(summary, console)
    if view.groups:
        say("", console)
        print_table(_shards(view.groups), console)
    for note in view.notes:
        say(f"note: {note}", console)
    for problem in view.problems:
        say(f"problem: {problem}", console, style="bold red")


def show_run(rows: Sequence[CandidateView], console: Console) -> None:
    """Print the checkpoints of a run, newest first, and which of them `resume` would take."""
    table = _table("checkpoint", "status", right=CANDIDATE_COLUMNS)
    table.add_column("")
    for row in rows:
        facts = row.facts or [""] * len(CANDIDATE_COLUMNS)
        style = "" if row.status == "good" else "bold red"
        picked = "resume takes it" if row.is_picked else ""
        table.add_row(row.name, Text(row.status, style=style), *map(Text, facts), Text(picked))
    print_table(table, console)


def show_numbers(rows: Sequence[TensorNumbersView], console: Console) -> None:
    """Print range and counts of every tensor."""
    table = _table("tensor", right=NUMBERS_COLUMNS)
    for row in rows:
        table.add_row(Text(row.name), *map(Text, row.texts))
    print_table(table, console)


def show_files(files: Sequence[WeightFileView], console: Console) -> None:
    """Print the weight files of a model folder, and their sum."""
    table = _table("file", right=("tensors", "parameters", "dtypes", "bytes"))
    for file in files:
        parameters, size = show_count(file.num_parameters), show_bytes(file.num_bytes)
        dtypes = ", ".join(file.dtypes)
        table.add_row(Text(file.name), str(len(file.tensors)), parameters, dtypes, size)
    tensors = str(sum(len(file.tensors) for file in files))
    parameters = show_count(sum(file.num_parameters for file in files))
    size = show_bytes(sum(file.num_bytes for file in files))
    table.add_row("total", tensors, parameters, "", size)
    print_table(table, console)


def _shards(groups: Sequence[ShardGroupView]) -> Table:
    parts = list(dict.fromkeys(part for group in groups for part, _, _ in group.parts))
    table = _table("shards", right=("parameters", *parts, "bytes"))
    sums = dict.fromkeys(parts, 0)
    for group in groups:
        count = len(group.names)
        cells = {}
        for part, dtypes, num_bytes in group.parts:
            cells[part] = f"{' '.join(dtypes)} {show_bytes(num_bytes)}"
            sums[part] += num_bytes * count
        name = group.names[0]
        if count > 1:  # all but `bytes` are of one; in 80 columns
            name += f"..{group.names[-1].rpartition('-')[2]} each"
        total = show_bytes(count * sum(num_bytes for _, _, num_bytes in group.parts))
        table.add_row(
            Text(name),
            show_count(group.num_parameters),
            *(Text(cells.get(part, "")) for part in parts),
            total,
        )
    parameters = sum(group.num_parameters * len(group.names) for group in groups)
    totals = [show_bytes(sums[part]) for part in parts]
    table.add_row("total", show_count(parameters), *totals, show_bytes(sum(sums.values())))
    return table


def _table(*left: str, right: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in left:
        table.add_column(column)
    for column in right:
        table.add_column(column, justify="right")
    return table
