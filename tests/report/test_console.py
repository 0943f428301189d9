"""The console: a bar in a terminal; elsewhere one plain line a step, for `grep` and job logs."""

import io
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from rich.console import Console

from megatrain_cli.report.console import RunConsole, data, talk
from megatrain_cli.report.listener import Listener
from megatrain_cli.report.plan_view import show_plan
from megatrain_cli.report.records import StepRecord


@dataclass(frozen=True)
class Line:
    owner: str
    place: str
    num_bytes: int
    formula: str


@dataclass(frozen=True)
class Bill:
    lines: tuple[Line, ...]
    summary: tuple[tuple[str, str], ...] = ()
    verdict_line: str = "DOES NOT FIT: 3 GiB of host RAM are missing"
    warnings: tuple[str, ...] = ("slabs [starve]",)


BILL = Bill(
    lines=(
        Line("weights", "host pinned", 1 << 30, "2 bytes x 536870912 parameters, " + "long " * 40),
        Line("moments", "host pinned", 1 << 31, "8 bytes"),
        Line("staging", "device", 1 << 20, "[2] slots"),
    ),
    summary=(("device", "cuda:0 [red]"),),
)


def file_console() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=80), out


def record(step: int) -> StepRecord:
    return StepRecord(step, 2.34567, 2e-5, 0.51234, 100, 123456.7, 0.25)


def test_no_bar_hides_the_cursor_which_a_killed_process_could_not_show(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = io.StringIO()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, to rich
    with RunConsole() as run:
        run.preparing(5, 0.5)
        run.preparing(10, 1)
        run.step(record(1), 10)
    assert "step 1/10" in out.getvalue()
    assert "\x1b[" in out.getvalue()
    assert "\x1b[?25l" not in out.getvalue()


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    out = io.StringIO()
    with RunConsole(Console(file=out, width=80, force_terminal=True)) as run:
        run.step(record(1), 2)
        assert out.getvalue().startswith("step 1/2  loss")


def test_outside_a_terminal_the_data_is_a_line_now_and_then() -> None:
    console, out = file_console()
    seconds = iter([0.0, 9.9, 10.0, 12.0, 25.0])
    with RunConsole(console, lambda: next(seconds)) as run:
        for rows in range(1, 6):
            run.preparing(100 * rows, rows / 5)
    assert out.getvalue() == (
        "prepared 300 rows, 60% of the data\nprepared 500 rows, 100% of the data\n"
    )


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_in_a_terminal_the_data_is_a_bar_that_goes_when_all_is_read(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out = io.StringIO()
    with RunConsole(Console(file=out, width=80, force_terminal=True)) as run:
        run.preparing(1234, 0.25)
        run.preparing(5678, share)
        assert (run._preparing is None) is (share == 1)
    assert run._preparing is None
    assert f"prepared {5678} rows" in out.getvalue()
    assert f"{100 * share:.0f} %" in out.getvalue()


def test_what_stands_in_for_stderr_while_a_bar_is_shown_may_write_to_the_listener(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listener = Listener()
    monkeypatch.setattr(sys, "stderr", listener)
    listener.write("heard once")
    listener.flush()
    assert capsys.readouterr().err == "heard once"


def test_outside_a_terminal_a_step_is_one_plain_line() -> None:
    console, out = file_console()
    with RunConsole(console) as run:
        run.step(record(1), 1_000_000)
        run.step(record(2), 1_000_000)
    first, second = out.getvalue().splitlines()
    assert first == "step 1/1000000  loss 2.3457  lr 2e-05  grad_norm 0.5123  targets/s 123457"
    assert second.startswith("step 2/1000000  ")
    assert "\x1b" not in out.getvalue()
    assert "\r" not in out.getvalue()


def test_long_lines_are_not_wrapped_and_brackets_are_no_markup() -> None:
    console, out = file_console()
    with RunConsole(console) as run:
        run.note("[bold]" + "x" * 200 + " :smile:")
        run.saved(Path("/" + "y" * 200), 1536, 0.5, 0.0)
    first, second = out.getvalue().splitlines()
    assert first == "[bold]" + "x" * 200 + " :smile:"
    assert (
        second == "saved /" + "y" * 200 + " (1.50 KiB in 0.5 s, 3.00 KiB/s; training waited 0.0 s)"
    )


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (40, ("step 2999/3000  loss 2.3457",)),
        (80, ("loss 2.3457  lr 2e-05  grad_norm 0.5123  targets/s 3613", " -:--:--")),
        (120, ("loss 2.3457  lr 2e-05  grad_norm 0.5123  targets/s 3613", " -:--:--", "\u2501")),
    ],
)
def test_a_narrow_terminal_loses_the_bar_before_the_numbers(
    width: int, shown: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None)
    with RunConsole(console) as run:
        run.step(replace(record(2999), tokens_per_second=3613.0), 3000)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert all(part in text for part in shown), text


def test_in_a_terminal_the_step_stays_on_a_bar() -> None:
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=True)
    run = RunConsole(console)
    run.step(record(3), 10)
    run.step(record(4), 10)
    run.note("note among steps")
    run.close()
    run.close()
    text = out.getvalue()
    assert "step 4/10" in text
    assert "loss 2.3457" in text
    assert "note among steps" in text


def test_a_plan_lists_owners_and_totals_of_places_uncut() -> None:
    console, out = file_console()
    show_plan(BILL, console)
    lines = out.getvalue().splitlines()
    assert lines[0].split() == ["device", "cuda:0", "[red]"]
    [weights] = [line for line in lines if line.startswith("weights")]
    assert weights.endswith("long long")
    totals = [line.split() for line in lines if line.startswith("total")]
    assert totals == [
        ["total", "host", "pinned", "3.00", "GiB"],
        ["total", "device", "1.00", "MiB"],
    ]
    assert lines[-2:] == [BILL.verdict_line, "warning: slabs [starve]"]


def test_a_run_shows_its_plan_on_the_same_console() -> None:
    console, out = file_console()
    RunConsole(console).plan(BILL)
    assert "total" in out.getvalue()


def test_talk_goes_to_stderr_and_data_to_stdout() -> None:
    assert talk().stderr
    assert not data().stderr
