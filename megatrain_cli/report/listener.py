"""stderr for as long as somebody reads it: a run does not end because a terminal was closed."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class Listener:
    """A text stream onto stderr that goes on into nothing where stderr fails.

    What is said to a person may be lost; `metrics.jsonl` has the numbers. Without this a closed
    pipe (`2>&1 | tee log`, and `tee` dies) would end a run of days without its weights.
    """

    def __init__(self) -> None:
        """Take stderr as it is now: while a bar is shown, rich's stand-in for it writes here."""
        self._file = sys.stderr

    def write(self, text: str) -> int:
        """Say something, if anybody listens."""
        if self._file is not None:
            with _or_nobody():
                self._file.write(text)
        return len(text)

    def flush(self) -> None:
        """Pass on what was said."""
        if self._file is not None:
            with _or_nobody():
                self._file.flush()

    def isatty(self) -> bool:
        """Whether a terminal listens."""
        return self._file is not None and self._file.isatty()

    def fileno(self) -> int:
        """The number of stderr."""
        return 2

    @property
    def encoding(self) -> str:
        """What stderr can write: a bar is drawn with plain signs where that is not Unicode."""
        return str(getattr(self._file, "encoding", "utf-8"))


@contextmanager
def _or_nobody() -> Iterator[None]:
    try:
        yield
    except OSError:
        # As Python's documentation has it for a broken pipe (library/signal, "Note on SIGPIPE"):
        # what is buffered still goes somewhere, or the process would leave with 120.
        nobody = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nobody, 2)
        os.close(nobody)
