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


def test_the_second_signal_does_what_it_did_before() -> None:
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert stop.signal_name == "SIGTERM"


@SIGNALS
def test_the_former_handler_is_back_afterwards(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopRequest():
        assert signal.getsignal(number) != before
    assert signal.getsignal(number) == before
