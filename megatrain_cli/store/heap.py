"""Which blocks the C library returns to the system as soon as they are free.

glibc raises its limit by itself, up to 32 MiB, when it sees large blocks freed. Gradients, logits
and what filling a store needs then come from its heap and stay there: a run of 56 million
parameters in BF16 kept 250 MiB that nobody used. With a fixed limit large blocks are mappings.
"""

import ctypes

from megatrain_cli.units import MIB

# Of malloc.h: M_TRIM_THRESHOLD and M_MMAP_THRESHOLD.
_TRIM, _MMAP = -1, -3

BLOCK_BYTES = 4 * MIB
"""Blocks from this size on are mapped. Smaller ones come again many times in a step."""

# Free bytes that the heap's end keeps: activations come and go at each step.
_KEPT_BYTES = 64 * MIB


def settle_heap() -> None:
    """Fix the limits for this process; does nothing where the C library is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP, BLOCK_BYTES)
        mallopt(_TRIM, _KEPT_BYTES)
