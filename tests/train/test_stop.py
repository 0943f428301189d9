"""The first signal asks, the second ends at once, and nothing of it outlives the run."""

import signal

import pytest

from megatrain_cli.train import stop as stop_module
from megatrain_cli.train.stop import StopRequest

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
            assert ended.pop() == signal.SIGINT
            assert stop.signal_name == first.name
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
        assert ended == [second]


@SIGNALS
def test_the_former_handler_is_back_afterwards(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopRequest():
        assert signal.getsignal(number) != before
    assert signal.getsignal(number) == before


def test_a_wish_that_came_before_is_noted_and_one_that_comes_behind_waits() -> None:
    wish = {signal.SIGUSR1}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, wish)
    try:
        signal.raise_signal(signal.SIGUSR1)
        with StopRequest() as stop:
            assert stop.take_wish()
            assert not stop.take_wish()
        signal.raise_signal(signal.SIGUSR1)
        assert signal.sigpending() == wish
        signal.sigwait(wish)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
