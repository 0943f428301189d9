"""Which blocks the C library returns to the system as soon as they are free.

glibc raises its limit by itself, up to 32 MiB, when it sees large blocks freed. Gradients, logits
and what filling a store needs then come from its heap and stay there: a run of 56 million
parameters in BF16 kept 250 MiB that nobody used. With a fixed limit large blocks are mappings.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from megatrain_cli.units import MIB

# Of malloc.h: M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX and glibc's default of that, and
# M_ARENA_MAX.
_TRIM, _MMAP, _MMAP_MAX, _MAPPINGS, _HEAPS = -1, -3, -4, 65536, -8

BLOCK_BYTES = 4 * MIB
"""Blocks from this size on are mapped. Smaller ones come again many times in a step."""

# Free bytes that the heap's end keeps: activations come and go at each step.
_KEPT_BYTES = 64 * MIB


def settle_heap() -> None:
    """Fix the limits for this process; does nothing where the C library is not glibc.

    Threads that begin later share one heap: heaps of their own would keep what layers were made of
    while the store was filled, 45 MiB with 56 million parameters on two threads, and no step uses
    those.
    """
    _set({_HEAPS: 1, _MMAP_MAX: _MAPPINGS, _MMAP: BLOCK_BYTES, _TRIM: _KEPT_BYTES})


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
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _set(options: dict[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in options.items():
            mallopt(option, value)
