"""Which blocks the C library returns to the system as soon as they are free.

glibc raises its limit by itself, up to 32 MiB, when it sees large blocks freed. Gradients, logits
and what filling a store needs then come from its heap and stay there: a run of 56 million
parameters in BF16 kept 250 MiB that nobody used. With a fixed limit large blocks are mappings.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from megatrain_cli.units import MIB

# Of malloc.h: M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX and glibc's default of that.
_TRIM, _MMAP, _MMAP_MAX, _MAPPINGS = -1, -3, -4, 65536

BLOCK_BYTES = 4 * MIB
"""Blocks from this size on are mapped. Smaller ones come again many times in a step."""

# Free bytes that the heap's end keeps: activations come and go at each step.
_KEPT_BYTES = 64 * MIB


def settle_heap() -> None:
    """Fix the limits for this process; does nothing where the C library is not glibc."""
    _set({_MMAP_MAX: _MAPPINGS, _MMAP: BLOCK_BYTES, _TRIM: _KEPT_BYTES})


def trim_heap() -> None:
    """Give back what lies free, in the heaps of all threads.

    Each thread has a heap, which stays when it ends. Those that filled a store keep what layers
    were made of, 45 MiB with 56 million parameters on two threads, and no step uses it. (With one
    heap for all threads steps in BF16 took 4, 4 and 14 % longer in three pairs of runs.)
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextmanager
def touched_heap() -> Iterator[None]:
    """Blocks of any size come from the heap and stay in it, so what comes again was touched before.

    For measuring what work takes without what new memory takes. Leaves the heap settled.
    """
    _set({_MMAP_MAX: 0, _TRIM: 2**31 - 1})
    try:
        yield
    finally:
        settle_heap()
        trim_heap()


def _set(options: dict[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in options.items():
            mallopt(option, value)
