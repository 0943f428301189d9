"""First fit, as machine code: which bin each item goes into."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

P = ParamSpec("P")
R = TypeVar("R")


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compile at the first call; the machine code is kept where a folder can be written."""
    try:
        made = numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:
        made = numba.njit(nogil=True)(function)
    return cast(Callable[P, R], made)


@compiled
def first_fit(sizes: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """Put each item, in order, into the first bin that has room for it.

    The leaves of a binary tree are the room left in each bin, in order; an inner node has the most
    of those below it. So the first bin with room is found in as many steps as the tree is high.

    Args:
        sizes: `(n,)`, each from 1 to `capacity`.
        capacity: Of every bin.

    Returns:
        `(n,)`: bins, numbered in the order in which they are opened.
    """
    num_leaves = 1
    while num_leaves < len(sizes):
        num_leaves *= 2
    room = np.full(2 * num_leaves, capacity, dtype=np.int64)
    found = np.empty(len(sizes), dtype=np.int64)
    for i in range(len(sizes)):
        node = 1
        while node < num_leaves:
            node *= 2
            if room[node] < sizes[i]:
                node += 1
        found[i] = node - num_leaves
        room[node] -= sizes[i]
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return found
