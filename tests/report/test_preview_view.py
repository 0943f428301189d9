"""What is trained on is told from what is not, in a terminal and in a file; text stays text."""

import io
from dataclasses import dataclass, field

import pytest
from rich.console import Console

from megatrain_cli.report.console import RunConsole
from megatrain_cli.report.preview_view import draw_spans, legend, show_row

SPANS = [("ask [x] ", False), ("say\n[/b]", True)]


@dataclass(frozen=True)
class Document:
    line: int
    start: int
    num_tokens: int
    num_targets: int = 2
    source: str = "a.jsonl"
    spans: list[tuple[str, bool]] = field(default_factory=lambda: SPANS)


@dataclass(frozen=True)
class Row:
    documents: tuple[Document, ...]
    capacity: int | None = None
    num_tokens: int = 5
    num_targets: int = 2


def console(*, colour: bool, width: int = 40) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    if colour:
        return Console(file=out, width=width, force_terminal=True, color_system="standard"), out
    return Console(file=out, width=width, color_system=None), out


def test_a_file_gets_brackets_and_no_escapes() -> None:
    plain, out = console(colour=False)
    show_row(Row((Document(7, 0, 5),)), 1, plain)
    assert out.getvalue() == "row 1: a.jsonl:7, 5 tokens, 2 targets\nask [x] [say\n[/b]]\n"
    assert legend(plain).plain == "[trained] in brackets"


def test_a_terminal_gets_two_colours_and_the_text_as_it_is() -> None:
    terminal, out = console(colour=True)
    terminal.print(draw_spans(SPANS, terminal), soft_wrap=True)
    assert out.getvalue() == "\x1b[36mask [x] \x1b[0m\x1b[1;32msay\x1b[0m\n\x1b[1;32m[/b]\x1b[0m\n"
    assert legend(terminal).plain == "trained, not trained"


def test_a_terminal_without_colours_gets_brackets() -> None:
    plain = Console(file=io.StringIO(), force_terminal=True, color_system="standard", no_color=True)
    assert draw_spans(SPANS, plain).plain == "ask [x] [say\n[/b]]"


def test_a_pack_shows_where_documents_begin_and_positions_restart() -> None:
    plain, out = console(colour=False)
    show_row(Row((Document(1, 0, 3), Document(9, 3, 2)), 8), 4, plain)
    assert [line for line in out.getvalue().splitlines() if line[:3] in ("row", "---")] == [
        "row 4: 2 documents, 5 tokens, 2 targets, room for 8",
        "--- 1 of 2: a.jsonl:1, tokens 0 to 2 of the row, positions from 0 to 2, 2 targets",
        "--- 2 of 2: a.jsonl:9, tokens 3 to 4 of the row, positions from 0 to 1, 2 targets",
        "--- end of row 4",
    ]


@pytest.mark.parametrize(
    ("text", "shown"),
    [("\x1b]0;me\x07", "\\x1b]0;me\\x07"), ("a\rb", "a\\x0db"), ("\u202eab\x9b", "\\u202eab\\x9b")],
)
def test_no_text_of_a_row_controls_the_terminal(text: str, shown: str) -> None:
    terminal, _ = console(colour=True)
    assert draw_spans([(text, False)], terminal).plain == shown


def test_a_run_shows_the_beginning_of_its_first_row() -> None:
    plain, out = console(colour=False)
    with RunConsole(plain) as run:
        run.first_row([("q" * 590, False), ("answer " * 9, True)])
    assert out.getvalue() == f"first row, [trained] in brackets: {'q' * 590}[answer an\n"
