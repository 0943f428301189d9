"""The first signal asks, the second ends at once, and nothing of it outlives the run."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest

from megatrain_cli import signals
from megatrain_cli.errors import NumericsError, Stopped
from megatrain_cli.signals import LIMITS, WISHES
from megatrain_cli.train import stop as stop_module
from megatrain_cli.train.stop import StopRequest

pytestmark = pytest.mark.usefixtures("heeds_hangup")

SIGNALS = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])


@SIGNALS
def test_the_first_signal_is_noted_by_name(number: signal.Signals) -> None:
    with StopRequest() as stop:
        assert stop.signal_name is None
        signal.raise_signal(number)
        assert stop.signal_name == number.name


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Signals that would have ended the process."""
    numbers: list[int] = []
    monkeypatch.setattr(stop_module, "leave_now", lambda number, line: numbers.append(number))
    return numbers


def test_a_second_interrupt_ends_at_once_whatever_it_did_before(
    ended: list[int],
) -> None:
    """Right after another signal the first one may be of the same request, of a cancelled job."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    for first in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        with StopRequest(clock=lambda: 100.0) as stop:
            signal.raise_signal(first)
            if first != signal.SIGINT:
                signal.raise_signal(signal.SIGINT)
            assert not ended
            signal.raise_signal(signal.SIGINT)
            assert stop.signal_name == first.name
            assert ended.pop() == signal.SIGINT
    assert signal.signal(signal.SIGINT, before) == signal.SIG_IGN


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGHUP])
@SIGNALS
def test_what_follows_in_the_same_second_is_the_same_request_and_later_ends_at_once(
    number: signal.Signals, second: signal.Signals, ended: list[int]
) -> None:
    """`timeout` sends SIGTERM twice, and a closed terminal SIGHUP."""
    now = 100.0
    with StopRequest(clock=lambda: now) as stop:
        signal.raise_signal(number)
        now = 100.9
        signal.raise_signal(second)
        assert stop.signal_name == number.name
        assert stop.seconds == pytest.approx(0.9)
        assert not ended
        now = 101.1
        signal.raise_signal(second)
        assert stop.number == number  # heard of by now, on whichever thread
        assert ended == [second]


@pytest.mark.parametrize("number", LIMITS)
@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGXCPU])
def test_a_limit_that_is_exceeded_is_never_a_second_request(
    first: signal.Signals, number: signal.Signals, ended: list[int]
) -> None:
    """SIGXCPU comes with every second of CPU time, which many threads use up in an instant."""
    now = 100.0
    with StopRequest(clock=lambda: now) as stop:
        signal.raise_signal(first)
        for later in (100.9, 101.1, 160.0):
            now = later
            signal.raise_signal(number)
        assert stop.signal_name == first.name
        assert not ended
        signal.raise_signal(signal.SIGTERM)
        assert stop.number == first
        assert ended == [signal.SIGTERM]


def test_a_quit_ends_at_once(ended: list[int]) -> None:
    before = signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGQUIT)
        assert stop.number == signal.SIGQUIT
        assert ended[0] == signal.SIGQUIT
        assert stop.seconds >= 0
    assert signal.signal(signal.SIGQUIT, before) == signal.SIG_DFL


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT, *LIMITS])
def test_a_signal_that_was_ignored_stays_so(number: signal.Signals, ended: list[int]) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    with StopRequest() as stop:
        signal.raise_signal(number)
        assert stop.signal_name is None
    assert not ended
    assert signal.signal(number, before) == signal.SIG_IGN


def leave(line: str) -> None:
    """`leave_now`, where a test has it return."""
    signals.leave_now(signal.SIGTERM, line)


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, str]]]:
    """Exit code and line of each end of the process that was no end."""
    ends: list[tuple[int, str]] = []
    lines: list[str] = []
    monkeypatch.setattr(os, "write", lambda fd, line: lines.append(line.decode()))
    monkeypatch.setattr(os, "_exit", lambda code: ends.append((code, "".join(lines))))
    yield ends
    signals.leave_end_open()


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (Stopped("Stopped by SIGTERM; all is saved."), (75, "Stopped by SIGTERM; all is saved.\n")),
        (NumericsError("It is not finite."), (8, "It is not finite.\n")),
        (None, (0, "")),
        (ValueError("a bug"), (143, "Terminated.\n")),
    ],
)
def test_once_it_is_known_how_a_run_ends_a_signal_only_hastens_that(
    error: Exception | None, end: tuple[int, str], left: list[tuple[int, str]]
) -> None:
    """As page-locked memory is given back, for seconds: what is saved must not be called lost."""
    with suppress(Exception), StopRequest():
        if error is not None:
            raise error
    leave("Terminated.")
    assert left == [end]


def test_the_next_run_of_a_process_is_open_again(left: list[tuple[int, str]]) -> None:
    with StopRequest():
        pass
    with StopRequest():
        leave("Terminated.")
    assert left == [(143, "Terminated.\n")]


@SIGNALS
def test_the_former_handler_is_back_afterwards(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopRequest():
        assert signal.getsignal(number) != before
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("number", WISHES)
def test_a_wish_that_came_before_is_noted_and_one_that_comes_behind_waits(
    number: signal.Signals,
) -> None:
    wish = {number}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, wish)
    try:
        signal.raise_signal(number)
        with StopRequest() as stop:
            assert stop.take_wish()
            assert not stop.take_wish()
        signal.raise_signal(number)
        assert signal.sigpending() == wish
        signal.sigwait(wish)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
