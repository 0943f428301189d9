"""Which blocks the C library returns to the system as soon as they are free.

glibc raises its limit by itself, up to 32 MiB, when it sees large blocks freed. Gradients, logits
and what filling a store needs then come from its heap and stay there: a run of 56 million
parameters in BF16 kept 250 MiB that nobody used. With a fixed limit large blocks are mappings.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from megatrain_cli.plan.heap import BLOCK_BYTES
from megatrain_cli.units import MIB

# Of malloc.h: M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX and glibc's default of that.
_TRIM, _MMAP, _MMAP_MAX, _MAPPINGS = -1, -3, -4, 65536

# Free bytes that the heap's end keeps: activations come and go at each step. And where blocks do
# not come again.
_KEPT_BYTES, _LEAN_BYTES = 64 * MIB, MIB


def settle_heap() -> None:
    """Fix the limits for this process; does nothing where the C library is not glibc."""
    _set({_MMAP_MAX: _MAPPINGS, _MMAP: BLOCK_BYTES, _TRIM: _KEPT_BYTES})


@contextmanager
def lean_heap() -> Iterator[None]:
    """What threads free goes back to the system, and at the end all that lies free.

    Each thread has a heap, which stays when it ends, and the free end of one is given back only
    when its own thread frees a block that makes it longer than the limit. With the limit of a run
    those that fill a store of 150 million parameters kept 90 MiB, and no step uses it. (One heap
    for all threads would keep less, but steps in BF16 took 4, 4 and 14 % longer in three pairs of
    runs.) Leaves the heap settled.
    """
    _set({_TRIM: _LEAN_BYTES})
    try:
        yield
    finally:
        settle_heap()
        _trim()


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
        _trim()


def _trim() -> None:
    # What lies free between blocks, in the heaps of all threads, and at the end of the first one's.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _set(options: dict[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in options.items():
            mallopt(option, value)
