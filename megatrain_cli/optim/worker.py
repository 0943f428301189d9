"""Updates tiles from pieces of their gradients on all cores, while the caller goes on.

The bits do not depend on the number of threads, on how the gradient came in pieces or on what else
is under way: see [Note: Same bits everywhere] and [Note: Chunks] in `optim.kernels`.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import pairwise
from types import TracebackType
from typing import Self

import numpy as np
import torch

from megatrain_cli.model.layout import LayerLayout, make_layout
from megatrain_cli.model.spec import LayerSpec, ParamSpec
from megatrain_cli.optim.adamw import (
    ALL_FORMATS,
    AdamStep,
    TilePiece,
    as_array,
    check_gradient,
    compile_kernel,
)
from megatrain_cli.optim.crew import Crew, WorkSpan
from megatrain_cli.optim.kernels import I64
from megatrain_cli.plan.tiles import TileFormat
from megatrain_cli.store.master import LayerTile, MasterStore

# The grain of all cuts inside a parameter: whole cache lines of every array (64 BF16 are 128
# bytes), so that two threads never write the same line.
GRAIN = 64

# Elements of a chunk, a multiple of GRAIN: a tenth of a millisecond on one core. 2**15 to 2**17
# are equally fast (16 cores of an H200's host); smaller ones even out threads that are held up.
CHUNK_ELEMENTS = 1 << 16


def decay_matrices_only(param: ParamSpec) -> bool:
    """The usual choice: weight decay on matrices, none on norms and biases."""
    return len(param.shape) > 1


class TileUpdater:
    """Threads that apply AdamW to tiles. Compiles its kernels when it is made, none later.

    Args:
        threads: How many cores to use.
        decay: Which parameters weight decay applies to.
        fmt: Compile for this format only; None compiles for all of them.
        cores: Those that the threads are bound to, as `optimizer_cores` chooses them; None leaves
            the threads where the system puts them.
    """

    def __init__(
        self,
        threads: int,
        decay: Callable[[ParamSpec], bool] = decay_matrices_only,
        fmt: TileFormat | None = None,
        cores: Sequence[int] | None = None,
    ) -> None:
        self._decay = decay
        self._pieces: dict[tuple[int, int, int], TilePiece] = {}
        for one in ALL_FORMATS if fmt is None else (fmt,):
            _compile_for(one)
        self._crew = Crew(threads, cores)

    def submit(
        self, tile: LayerTile, gradient: torch.Tensor, start: int, step: AdamStep
    ) -> Future[WorkSpan]:
        """Start to update elements `[start, start + n)` of the tile; returns at once.

        Updates are worked on in the order of submission and end in about that order; with one
        thread, exactly. Those that are under way at the same time must not overlap. Pieces may
        begin and end anywhere, inside a parameter too. The gaps between parameters are left as
        they are: zero.

        Args:
            tile: The range is not read or written by anybody else until the future is done.
            gradient: `(n,)`, compute dtype, contiguous, in host memory; only read, until then.
            start: The tile's element that the gradient's first element belongs to.
            step: The same for all tiles of an optimizer step.

        Returns:
            A future of the time that the work took. It fails with `InternalError`, which names
            layer and parameters, when no thread touches the tile any more; the range is then half
            updated. Callbacks run on a thread of the optimizer: they must be short, must not raise
            and must not wait for other updates. It cannot be cancelled.

        Raises:
            InternalError: The gradient does not fit the tile, or the updater is closed.
        """
        check_gradient(tile, gradient, start)
        piece = self._piece(tile, start, start + gradient.numel())
        gradients, scalars = as_array(gradient), step.scalars
        key, next_chunk = step.rounding_key(tile.index), np.zeros(1, np.int64)
        return self._crew.submit(
            f"Updating {piece.name}",
            lambda: piece.work_on(next_chunk, gradients, scalars, key),
        )

    def update(
        self, tile: LayerTile, gradient: torch.Tensor, start: int, step: AdamStep
    ) -> WorkSpan:
        """`submit`, and return when it is done."""
        return self.submit(tile, gradient, start, step).result()

    def close(self) -> None:
        """Finish what was submitted, end the threads and let go of the tiles.

        Calling it again does nothing. Not to be called from a callback.
        """
        self._crew.close()
        self._pieces.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _piece(self, tile: LayerTile, start: int, end: int) -> TilePiece:
        # A run has the same few pieces of every tile in each of its steps.
        piece = self._pieces.get((tile.index, start, end))
        if piece is None or piece.tile is not tile:
            chunks = chunk_table(tile.layout, start, end, self._decay)
            chunks[:, :2] -= start
            piece = self._pieces[tile.index, start, end] = TilePiece(tile, start, end, chunks)
        return piece


def chunk_table(
    layout: LayerLayout, start: int, end: int, decay: Callable[[ParamSpec], bool]
) -> I64:
    """Cut the parameters in `[start, end)` into chunks, gaps left out.

    Cuts inside a parameter are at multiples of `CHUNK_ELEMENTS` of the tile, so that the grain is
    the tile's. A small parameter is a chunk of its own: taking one costs an atomic addition.

    Returns:
        `(n, 3)`: a chunk's start and end in the tile, and 1 where weight decay applies, else 0.
    """
    rows: list[tuple[int, int, int]] = []
    for entry in layout.entries:
        first, last = max(start, entry.offset), min(end, entry.end)
        if first < last:
            cuts = range((first // CHUNK_ELEMENTS + 1) * CHUNK_ELEMENTS, last, CHUNK_ELEMENTS)
            decays = int(decay(entry.param))
            rows += [(a, b, decays) for a, b in pairwise((first, *cuts, last))]
    return np.array(rows, np.int64).reshape(-1, 3)


def _compile_for(fmt: TileFormat) -> None:
    layer = LayerSpec("compile", "compile", (ParamSpec("compile", (64,)),))
    store = MasterStore((make_layout(layer),), fmt)
    compile_kernel(store.tiles[0])
    store.close()
