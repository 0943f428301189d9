"""Signals are heeded while Python's own handler waits for its turn, in their order, and in turn."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from megatrain_cli.signals import SignalThread

NUMBERS = [signal.SIGUSR1, signal.SIGTERM]
PATIENCE = 60  # seconds; no test that is right waits so long


@contextmanager
def heeding(signals: SignalThread) -> Iterator[SignalThread]:
    signals.start()
    try:
        yield signals
    finally:
        signals.stop()


def a_wait_ends(seconds: float) -> bool:
    """Whether a wait of the main thread ends by a signal that another thread gets meanwhile."""
    heeded, begins = threading.Event(), threading.Event()

    def get() -> None:
        begins.wait()
        signal.raise_signal(signal.SIGTERM)

    thread = threading.Thread(target=get)
    with heeding(SignalThread([signal.SIGTERM], lambda _: heeded.set())):
        thread.start()
        begins.set()
        ends = heeded.wait(seconds)
        thread.join()
    return ends


def test_a_signal_is_heeded_while_the_main_thread_waits_and_another_one_got_it() -> None:
    assert all(a_wait_ends(PATIENCE) for _ in range(20))


def test_without_the_thread_it_would_be_heeded_behind_the_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SignalThread, "_listen", lambda _: None)
    assert not all(a_wait_ends(0.05) for _ in range(50))


def test_signals_are_heeded_in_their_order_and_others_are_not() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    with heeding(SignalThread(NUMBERS, heard.append)) as signals:
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGUSR1):
            signal.raise_signal(number)
        signals.catch_up()
        assert heard == [signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1]
    signal.signal(signal.SIGUSR2, before)


def test_one_is_heeded_at_a_time() -> None:
    """The second comes in the middle of the first, on the thread that is at it."""
    done: list[str] = []

    def heed(number: int) -> None:
        done.append("begun")
        if len(done) == 1:
            signal.raise_signal(number)
            assert done == ["begun"]
        done.append("ended")

    with heeding(SignalThread(NUMBERS, heed)) as signals:
        signal.raise_signal(signal.SIGTERM)
        signals.catch_up()
        assert done == ["begun", "ended"] * 2


def test_what_came_before_the_end_is_heeded_and_all_is_as_it_was_behind_it() -> None:
    heard: list[int] = []
    handlers = [signal.getsignal(number) for number in NUMBERS]
    outer = SignalThread([signal.SIGTERM], lambda number: heard.append(-number))
    inner = SignalThread(NUMBERS, heard.append)
    with heeding(outer):
        with heeding(inner):
            signal.raise_signal(signal.SIGTERM)
        assert heard.pop() == signal.SIGTERM
        signal.raise_signal(signal.SIGTERM)
        outer.catch_up()
        inner.catch_up()
        assert heard == [-signal.SIGTERM]
    assert [signal.getsignal(number) for number in NUMBERS] == handlers
    before = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(before)
    assert before == -1


def test_one_that_comes_as_the_end_is_made_is_of_whom_it_had_been(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[int] = []
    give_back = signal.signal

    def late(number: signal.Signals, handler: object) -> object:
        monkeypatch.setattr(signal, "signal", give_back)
        signal.raise_signal(signal.SIGTERM)
        before = signal.signal(number, handler)  # type: ignore[arg-type]  # as it came
        signal.raise_signal(signal.SIGTERM)
        return before

    with heeding(SignalThread([signal.SIGTERM], heard.append)) as outer:
        inner = SignalThread([signal.SIGTERM], lambda number: heard.append(-number))
        inner.start()
        monkeypatch.setattr(signal, "signal", late)
        inner.stop()
        outer.catch_up()
        assert heard == [signal.SIGTERM] * 2
