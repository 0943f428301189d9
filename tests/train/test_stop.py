"""The first signal asks, the second ends at once, and nothing of it outlives the run."""

import signal

import pytest

from megatrain_cli.train.stop import StopRequest

SIGNALS = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])


@SIGNALS
def test_the_first_signal_is_noted_by_name(number: signal.Signals) -> None:
    with StopRequest() as stop:
        assert stop.signal_name is None
        signal.raise_signal(number)
        assert stop.signal_name == number.name


def test_the_second_signal_ends_at_once_whatever_it_did_before() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert stop.signal_name == "SIGTERM"
    assert signal.signal(signal.SIGINT, before) == signal.SIG_IGN


@SIGNALS
def test_the_former_handler_is_back_afterwards(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopRequest():
        assert signal.getsignal(number) != before
    assert signal.getsignal(number) == before
