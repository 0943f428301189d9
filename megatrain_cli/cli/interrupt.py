"""What signals do before a run has anything to save. Imports nothing that takes long."""

import atexit
import os
import signal
from collections.abc import Iterable
from contextlib import suppress

from megatrain_cli.signals import LIMITS, WISHES, SignalThread, leave_now

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, *LIMITS)


def settle_signals() -> None:
    """From now on these end the process at once, with a line; `WISHES` wait for `StopRequest`.

    One that is ignored, as SIGHUP under `nohup`, stays so.

    These ask for a checkpoint; schedulers send one ahead of a time limit, to every process of a
    job and whatever it is at. Left alone it would end what has not begun to train. Blocked, it is
    kept by the system, once, also for threads and processes that are started from here on: these
    have the mask too, where a handler of ours would not have come with a new program.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, WISHES)
    usual = (signal.default_int_handler, signal.SIG_DFL)
    ours = [one for one in _ENDING if signal.getsignal(one) in usual]
    SignalThread(ours, _leave).start()
    atexit.register(_ignore, ours)  # the first to be registered is the last to be called


def fill_standard_numbers() -> None:
    """No file that is opened from now on gets the number of stdin, stdout or stderr.

    Where a caller has closed one of them (`2>&-`), the next file to be opened would get it: a line
    that goes to number 2, here or in a library, would then be written into a checkpoint.
    """
    with suppress(OSError):  # then there is no such device, and nothing to be done about it
        while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
            os.set_inheritable(number, True)
        os.close(number)


def _ignore(numbers: Iterable[int]) -> None:
    """All is done and said. Python gives signals their defaults back next, which kill: no code."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


def _leave(number: int) -> None:
    """Nothing is being written (`StopRequest` sees to what is).

    A KeyboardInterrupt does not get through the import of torch or transformers: it is taken for a
    missing module, is lost, or aborts the process from C++.
    """
    name = signal.Signals(number).name
    leave_now(number, "Interrupted." if number == signal.SIGINT else f"Stopped by {name}.")
