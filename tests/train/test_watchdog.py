"""A run in which nothing ends any more is noticed, and no other is."""

import itertools
import threading

from megatrain_cli.train.watchdog import Watchdog

# Of real time, which only a test that fails would take.
LONG = 30.0


def test_a_run_without_progress_is_noticed_once() -> None:
    """F59."""
    hung, calls = threading.Event(), []

    def on_hang() -> None:
        calls.append(threading.current_thread().name)
        hung.set()

    with Watchdog(lambda: 7, on_hang, seconds=0.01) as watchdog, watchdog.watching():
        assert hung.wait(LONG)
    assert calls == ["watchdog"]


def test_a_run_that_makes_progress_is_left_alone_however_long_it_takes() -> None:
    looks, enough, hung = itertools.count(), threading.Event(), threading.Event()

    def progress() -> int:
        look = next(looks)
        if look == 40:  # eight looks without progress are the time that is allowed
            enough.set()
        return look

    with Watchdog(progress, hung.set, seconds=0.01) as watchdog, watchdog.watching():
        assert enough.wait(LONG)
    assert not hung.is_set()
