"""The `megatrain` command; `python -m megatrain_cli` is the same.

Imports nothing that takes long before an interrupt ends the process without a traceback.
"""

import os
import signal
from types import FrameType


def main() -> None:
    """Run the command line of this process and leave with its exit code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where it is ignored
        signal.signal(signal.SIGINT, _leave)
    from megatrain_cli.cli.app import main as run  # noqa: PLC0415  # behind the handler

    run()


def _leave(number: int, frame: FrameType | None) -> None:
    """End at once on an interrupt; nothing is being written (`StopRequest` sees to what is).

    A KeyboardInterrupt does not get through the import of torch or transformers: it is taken for a
    missing module, is lost, or aborts the process from C++.
    """
    del number, frame
    os.write(2, b"Interrupted.\n")
    os._exit(130)


if __name__ == "__main__":
    main()
