"""What Ctrl-C does before a run has anything to save. Imports nothing that takes long."""

import signal
from types import FrameType

from megatrain_cli.train.stop import leave_now


def leave_on_interrupt() -> None:
    """From now on an interrupt ends the process at once, unless it is ignored or seen to."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    """Nothing is being written (`StopRequest` sees to what is).

    A KeyboardInterrupt does not get through the import of torch or transformers: it is taken for a
    missing module, is lost, or aborts the process from C++.
    """
    del frame
    leave_now(number, "Interrupted.")
