"""The tensors of an open checkpoint, piece by piece, so that memory does not grow with a tensor."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from megatrain_cli.checkpoint.elements import Bits, as_array
from megatrain_cli.checkpoint.folder import OpenCheckpoint
from megatrain_cli.checkpoint.manifest import Part
from megatrain_cli.checkpoint.places import ITEM_BYTES, TensorPlace

X = TypeVar("X")
Y = TypeVar("Y")

PIECE = 1 << 22
"""Elements looked at together. A few temporaries of that many FP32 values are held beside them."""


def pieces(checkpoint: OpenCheckpoint, part: Part, place: TensorPlace) -> Iterator[Bits]:
    """The elements of one tensor, flat, in order, `PIECE` at a time; BF16 as `uint16`.

    Read from the place that the manifest names. Hashes are not checked here.

    Raises:
        CorruptError: The file cannot be read, or ended early.
    """
    width = ITEM_BYTES[place.dtype]
    for start in range(0, place.numel, PIECE):
        count = min(PIECE, place.numel - start)
        offset = part.data_start + place.start + start * width
        yield as_array(place.dtype, checkpoint.read_bytes(part.file, offset, count * width))


def spread(work: Callable[[X], Y], items: Iterable[X], threads: int) -> list[Y]:
    """Do `work` for each item on up to `threads` threads; results in the order of the items.

    The first failure is raised, and what has not begun by then is left.
    """
    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(work, item) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
