"""How two checkpoints differ, as a table."""

from collections.abc import Sequence
from typing import Protocol

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatrain_cli.report.plan_view import print_table, say
from megatrain_cli.units import show_number

_SHOWN_NAMES = 20
_SHOWN_VALUE = 100


class TensorDiffView(Protocol):
    """One tensor whose bits differ, as far as showing it needs."""

    @property
    def name(self) -> str:
        """As stored."""

    @property
    def count(self) -> int:
        """Elements."""

    @property
    def differing(self) -> int:
        """Elements that differ."""

    @property
    def first(self) -> Sequence[int]:
        """Index of the first of them."""


class DifferenceView(Protocol):
    """What is not the same in two checkpoints, as far as showing it needs."""

    @property
    def only_left(self) -> Sequence[str]:
        """Tensors of the first alone."""

    @property
    def only_right(self) -> Sequence[str]:
        """Tensors of the second alone."""

    @property
    def reshaped(self) -> Sequence[tuple[str, str, str]]:
        """Tensors of another form: name and both forms."""

    @property
    def tensors(self) -> Sequence[TensorDiffView]:
        """Tensors whose bits differ."""

    @property
    def compared(self) -> int:
        """Tensors that were compared bit by bit."""

    @property
    def facts(self) -> Sequence[tuple[str, object, object]]:
        """Keys of the manifest that differ, and both values."""

    @property
    def aux(self) -> Sequence[str]:
        """Other files that differ."""


def show_difference(found: DifferenceView, left: str, right: str, console: Console) -> None:
    """Print what differs; with nothing to print, that all is equal."""
    say(f"left  {left}", console)
    say(f"right {right}", console)
    _names("only left", found.only_left, console)
    _names("only right", found.only_right, console)
    for name, one, other in found.reshaped:
        say(f"other form: {name}: {one} and {other}", console)
    if found.tensors:
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("tensor")
        for column in ("differing", "elements", "first at"):
            table.add_column(column, justify="right")
        for row in found.tensors:
            numbers = (str(row.differing), str(row.count), str(list(row.first)))
            table.add_row(Text(row.name), *map(Text, numbers))
        print_table(table, console)
    for key, value, changed in found.facts:
        say(f"{key}: {_both(value, changed)}", console)
    _names("other contents", found.aux, console)
    equal = found.compared - len(found.tensors)
    say(f"{equal} of {show_number(found.compared, 'tensor')} are equal bit for bit", console)


def _names(label: str, names: Sequence[str], console: Console) -> None:
    for name in names[:_SHOWN_NAMES]:
        say(f"{label}: {name}", console)
    if len(names) > _SHOWN_NAMES:
        say(f"{label}: {len(names) - _SHOWN_NAMES} more", console)


def _both(value: object, other: object) -> str:
    """Both values, unless they are lists whose beginnings would tell nothing."""
    lists = isinstance(value, list) and isinstance(other, list)
    if lists and max(len(str(value)), len(str(other))) > _SHOWN_VALUE:
        return "other values"
    return f"{_cut(value)} and {_cut(other)}"


def _cut(value: object) -> str:
    text = str(value)
    return text if len(text) <= _SHOWN_VALUE else f"{text[:_SHOWN_VALUE]}..."
