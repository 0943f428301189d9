"""A plan as a table: who owns which bytes, where, and by what formula."""

from collections.abc import Sequence
from io import StringIO
from typing import Protocol

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatrain_cli.units import show_bytes


class PlanLineView(Protocol):
    """One row of the bill, as far as showing it needs."""

    @property
    def owner(self) -> str:
        """Who holds the bytes."""

    @property
    def place(self) -> str:
        """`host pageable`, `host pinned` or `device`."""

    @property
    def num_bytes(self) -> int:
        """How many."""

    @property
    def formula(self) -> str:
        """Where the number comes from."""


class PlanView(Protocol):
    """A plan, as far as showing it needs. `report` stands below what decides plans."""

    @property
    def lines(self) -> Sequence[PlanLineView]:
        """The bill."""

    @property
    def summary(self) -> Sequence[tuple[str, str]]:
        """Other decisions, as label and text."""

    @property
    def verdict_line(self) -> str:
        """Whether it fits, and what stays free or is missing."""

    @property
    def warnings(self) -> Sequence[str]:
        """What a user may want to change all the same."""


# Nothing is cut where the output is a file: wider than any row, so that each stays on one line.
_WIDTH_IN_A_FILE = 400


def show_plan(plan: PlanView, console: Console) -> None:
    """Print the summary, one row an owner, the totals, the verdict and warnings."""
    summary = Table.grid(padding=(0, 2))
    for label, text in plan.summary:
        summary.add_row(Text(label, style="bold"), Text(text))
    print_table(summary, console)
    bill = Table(box=None, pad_edge=False, header_style="bold")
    bill.add_column("owner")
    bill.add_column("place")
    bill.add_column("bytes", justify="right")
    bill.add_column("formula")
    totals: dict[str, int] = {}
    for line in plan.lines:
        size = Text(show_bytes(line.num_bytes))
        bill.add_row(Text(line.owner), Text(line.place), size, Text(line.formula, style="dim"))
        totals[line.place] = totals.get(line.place, 0) + line.num_bytes
    for place, num_bytes in totals.items():
        total = Text(show_bytes(num_bytes), style="bold")
        bill.add_row(Text("total", style="bold"), Text(place, style="bold"), total, Text())
    console.print()
    print_table(bill, console)
    say(plan.verdict_line, console, style="bold")
    for warning in plan.warnings:
        say(f"warning: {warning}", console)


def print_table(table: Table, console: Console) -> None:
    """Print a table; outside a terminal its rows are never wrapped or cut."""
    if console.is_terminal:
        console.print(table)
        return
    # Rich takes what is no terminal for 80 columns wide, and draws no table wider than that.
    drawn = StringIO()
    Console(file=drawn, width=_WIDTH_IN_A_FILE, force_terminal=False).print(table)
    for line in drawn.getvalue().splitlines():
        say(line.rstrip(), console)


def say(text: str, console: Console, style: str | None = None) -> None:
    """Print one line as it is: brackets are no markup, and it is not wrapped at any width."""
    console.print(Text(text, style=style or ""), soft_wrap=True)
