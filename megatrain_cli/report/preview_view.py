"""Training rows as text, with what is learnt set off: in colour, or in brackets.

What a row holds was written by strangers: control characters are shown and never sent.
"""

import re
from collections.abc import Sequence
from typing import Protocol

from rich.console import Console
from rich.text import Text

from megatrain_cli.report.plan_view import say
from megatrain_cli.units import show_number

TRAINED, UNTRAINED = "bold green", "cyan"

# All of C0, C1 and DEL but the line break and the tab, and marks that turn the writing direction.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")

Spans = Sequence[tuple[str, bool]]
"""A text in pieces, each with whether it is trained on."""


class DocumentView(Protocol):
    """One document of a row, as far as showing it needs."""

    @property
    def source(self) -> str:
        """Its file."""

    @property
    def line(self) -> int:
        """In the file."""

    @property
    def start(self) -> int:
        """Where it begins in the row."""

    @property
    def num_tokens(self) -> int:
        """Its length."""

    @property
    def num_targets(self) -> int:
        """Tokens that are learnt."""

    @property
    def spans(self) -> Spans:
        """Its text."""


class RowView(Protocol):
    """One training row, as far as showing it needs."""

    @property
    def documents(self) -> Sequence[DocumentView]:
        """In their order."""

    @property
    def capacity(self) -> int | None:
        """Tokens that a pack has room for; None where a row is one document."""

    @property
    def num_tokens(self) -> int:
        """Of all documents."""

    @property
    def num_targets(self) -> int:
        """Of all documents."""


def legend(console: Console) -> Text:
    """How to tell what is trained on: `[trained] in brackets`, or the two colours."""
    if not _has_colour(console):
        return Text("[trained] in brackets")
    return Text.assemble(("trained", TRAINED), ", ", ("not trained", UNTRAINED))


def draw_spans(spans: Spans, console: Console) -> Text:
    """A text, as the legend says."""
    drawn = Text()
    for text, is_trained in spans:
        shown = _CONTROL.sub(_name, text)
        if _has_colour(console):
            drawn.append(shown, style=TRAINED if is_trained else UNTRAINED)
        else:
            drawn.append(f"[{shown}]" if is_trained else shown)
    return drawn


def show_row(row: RowView, number: int, console: Console) -> None:
    """Print a row; of a pack also where each document begins, and that its positions restart."""
    size = f"{show_number(row.num_tokens, 'token')}, {show_number(row.num_targets, 'target')}"
    if row.capacity is None:
        [document] = row.documents
        say(f"row {number}: {document.source}:{document.line}, {size}", console, style="bold")
        _show_text(document.spans, console)
        return
    count = len(row.documents)
    say(
        f"row {number}: {show_number(count, 'document')}, {size}, room for {row.capacity}",
        console,
        style="bold",
    )
    for i, document in enumerate(row.documents, start=1):
        end = document.start + document.num_tokens - 1
        say(
            f"--- {i} of {count}: {document.source}:{document.line}, tokens {document.start} to "
            f"{end} of the row, positions from 0 to {document.num_tokens - 1}, "
            f"{show_number(document.num_targets, 'target')}",
            console,
        )
        _show_text(document.spans, console)
    say(f"--- end of row {number}", console)


def show_first(spans: Spans, console: Console, most: int) -> None:
    """Print the first row of a run as one paragraph, at most so many characters of it."""
    drawn = Text.assemble("first row, ", legend(console), ": ", draw_spans(spans, console)[:most])
    console.print(drawn, soft_wrap=True)


def _show_text(spans: Spans, console: Console) -> None:
    drawn = draw_spans(spans, console)
    console.print(drawn, soft_wrap=True, end="" if drawn.plain.endswith("\n") else "\n")


def _has_colour(console: Console) -> bool:
    return console.color_system is not None and not console.no_color


def _name(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
