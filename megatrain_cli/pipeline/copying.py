"""Copies within host memory, by threads of their own.

Torch's `copy_` would use OpenMP, which makes a team of threads for each thread that calls it; they
would take cores from the optimizer. NumPy copies bytes by one `memmove`, and other Python threads
run meanwhile.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray

from megatrain_cli.errors import InternalError
from megatrain_cli.plan.tiles import PAGE_BYTES
from megatrain_cli.units import MIB, round_up

# The least that a thread gets: a sixth of a millisecond. Below that, handing out shows.
_PART_BYTES = MIB

Wait = Callable[[], None]
"""Returns when what it was given for has happened; calling it again does nothing."""


class CopyPool:
    """A few threads that share each copy; may be used from several threads at once."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="copy")

    def start(self, source: torch.Tensor, target: torch.Tensor) -> Wait:
        """Start copying and return at once.

        Args:
            source: Flat and contiguous, in host memory; not changed before the wait has returned.
            target: As many bytes, of any dtype; not read before.

        Returns:
            A function that returns when all bytes are there.
        """
        here, there = _bytes(source), _bytes(target)
        if here.size != there.size:
            raise InternalError(f"A copy of {here.size} bytes to {there.size}.")
        part = max(_PART_BYTES, round_up(-(-here.size // self.threads), PAGE_BYTES))
        parts = [
            self._pool.submit(np.copyto, there[at : at + part], here[at : at + part])
            for at in range(0, here.size, part)
        ]

        def wait() -> None:
            for one in parts:
                one.result()

        return wait

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy and return when all bytes are there."""
        self.start(source, target)()

    def close(self) -> None:
        """End the threads after what was started; calling it again does nothing."""
        self._pool.shutdown()


def _bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    return tensor.view(torch.uint8).numpy()
