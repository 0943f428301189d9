"""What signals do before a run has anything to save. Imports nothing that takes long."""

import signal

from megatrain_cli.signals import SignalThread, leave_now


def settle_signals() -> None:
    """From now on an interrupt ends the process at once, and SIGUSR1 waits for `StopRequest`.

    SIGUSR1 asks for a checkpoint; schedulers send it ahead of a time limit, to every process of a
    job and whatever it is at. Left alone it would end what has not begun to train. Blocked, it is
    kept by the system, once, also for threads and processes that are started from here on: these
    have the mask too, where a handler of ours would not have come with a new program.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        SignalThread([signal.SIGINT], _leave).start()


def _leave(number: int) -> None:
    """Nothing is being written (`StopRequest` sees to what is).

    A KeyboardInterrupt does not get through the import of torch or transformers: it is taken for a
    missing module, is lost, or aborts the process from C++.
    """
    leave_now(number, "Interrupted.")
