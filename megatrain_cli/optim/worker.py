"""Updates a tile from a piece of its gradient on all cores.

The bits do not depend on the number of threads or on how the gradient came in pieces: see
[Note: Same bits everywhere] in `optim.kernels`.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from numpy.typing import NDArray

from megatrain_cli.errors import InternalError
from megatrain_cli.model.layout import LayerLayout, make_layout
from megatrain_cli.model.spec import LayerSpec, ParamSpec
from megatrain_cli.optim.adamw import (
    ALL_FORMATS,
    AdamStep,
    TileArrays,
    as_array,
    check_gradient,
    compile_kernel,
)
from megatrain_cli.optim.kernels import Scalars
from megatrain_cli.plan.tiles import TileFormat
from megatrain_cli.store.master import LayerTile, MasterStore

# The grain of all cuts inside a parameter: whole cache lines of every array (64 BF16 are 128
# bytes), so that two threads never write the same line.
GRAIN = 64

# Elements a task should have at least: a third of a millisecond on one core. Below that, handing
# out tasks from Python costs a share that shows.
TASK_ELEMENTS = 1 << 18

# Tasks a thread for one large piece: enough to even out threads that are held up.
_TASKS_PER_THREAD = 4


@dataclass(frozen=True)
class Segment:
    """Elements `[start, end)` of a tile, all of one parameter."""

    param: ParamSpec
    start: int
    end: int


def decay_matrices_only(param: ParamSpec) -> bool:
    """The usual choice: weight decay on matrices, none on norms and biases."""
    return len(param.shape) > 1


class TileUpdater:
    """A pool of threads that apply AdamW to tiles. Compiles its kernels when it is made.

    Args:
        threads: How many cores to use.
        decay: Which parameters weight decay applies to.
        fmt: Compile for this format only; None compiles for all of them.
    """

    def __init__(
        self,
        threads: int,
        decay: Callable[[ParamSpec], bool] = decay_matrices_only,
        fmt: TileFormat | None = None,
    ) -> None:
        if threads < 1:
            raise InternalError(f"{threads} optimizer threads.")
        self.threads = threads
        self._decay = decay
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="adam")
        self._closed = False
        self._arrays: dict[int, TileArrays] = {}
        for one in ALL_FORMATS if fmt is None else (fmt,):
            _compile_for(one)

    def update(self, tile: LayerTile, gradient: torch.Tensor, start: int, step: AdamStep) -> None:
        """Update elements `[start, start + n)` of the tile and return when all are done.

        Pieces of one tile must not overlap within a step, and may begin and end anywhere, inside a
        parameter too. The gaps between parameters are left as they are: zero.

        Args:
            tile: Not read or written by anybody else meanwhile.
            gradient: `(n,)`, compute dtype, contiguous, in host memory; only read.
            start: The tile's element that the gradient's first element belongs to.
            step: The same for all tiles of an optimizer step.

        Raises:
            InternalError: A part failed, named by its parameter; the tile is then half updated.
                Raised when no thread touches the tile any more.
        """
        if self._closed:
            raise InternalError("The tile updater is closed.")
        check_gradient(tile, gradient, start)
        end = start + gradient.numel()
        piece = _Piece(
            self._arrays_of(tile),
            as_array(gradient),
            start,
            (step.scalars(decay=False), step.scalars(decay=True)),
            step.rounding_key(tile.index),
            self._decay,
        )
        tasks = [
            _Task(piece, segments) for segments in split_work(tile.layout, start, end, self.threads)
        ]
        futures = [self._pool.submit(task.run) for task in tasks]
        wait(futures)
        for task, future in zip(tasks, futures, strict=True):
            error = future.exception()
            if error is not None:
                raise InternalError(
                    f"Updating {task.current} of {tile.layout.layer.name} failed: {error}"
                ) from error

    def _arrays_of(self, tile: LayerTile) -> TileArrays:
        arrays = self._arrays.get(tile.index)
        if arrays is None or arrays.tile is not tile:
            arrays = self._arrays[tile.index] = TileArrays(tile)
        return arrays

    def close(self) -> None:
        """End the threads and let go of the tiles; calling it again does nothing."""
        self._closed = True
        self._arrays.clear()
        self._pool.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def split_work(layout: LayerLayout, start: int, end: int, threads: int) -> list[list[Segment]]:
    """Cut `[start, end)` into tasks, each a list of segments, gaps left out.

    Large parameters are cut at multiples of `GRAIN`; small ones share a task. Each task but one has
    at least `TASK_ELEMENTS` elements.
    """
    size = max(TASK_ELEMENTS, (end - start) // (threads * _TASKS_PER_THREAD))
    tasks: list[list[Segment]] = [[]]
    filled = 0
    for segment in _segments(layout, start, end):
        at = segment.start
        while at < segment.end:
            # Rounded from the tile's start, not the segment's, so that the grain is the tile's.
            cut = min(segment.end, (at + size - filled + GRAIN) // GRAIN * GRAIN)
            tasks[-1].append(Segment(segment.param, at, cut))
            filled += cut - at
            at = cut
            if filled >= size:
                tasks.append([])
                filled = 0
    return [task for task in tasks if task]


def _segments(layout: LayerLayout, start: int, end: int) -> Iterator[Segment]:
    for entry in layout.entries:
        first, last = max(start, entry.offset), min(end, entry.end)
        if first < last:
            yield Segment(entry.param, first, last)


@dataclass(frozen=True)
class _Piece:
    """What all tasks of one update share."""

    arrays: TileArrays
    gradient: NDArray[Any]
    start: int  # the tile's element that gradient[0] belongs to
    scalars: tuple[Scalars, Scalars]  # without decay, with decay
    rounding_key: int
    decay: Callable[[ParamSpec], bool]


class _Task:
    """A share of one update; remembers which parameter it is at, for the message if it fails."""

    def __init__(self, piece: _Piece, segments: list[Segment]) -> None:
        self.current = ""
        self._piece = piece
        self._segments = segments

    def run(self) -> None:
        """Do the work on the calling thread."""
        piece = self._piece
        for segment in self._segments:
            self.current = segment.param.name
            gradient = piece.gradient[segment.start - piece.start : segment.end - piece.start]
            scalars = piece.scalars[piece.decay(segment.param)]
            piece.arrays.update(gradient, segment.start, scalars, piece.rounding_key)


def _compile_for(fmt: TileFormat) -> None:
    layer = LayerSpec("compile", "compile", (ParamSpec("compile", (64,)),))
    store = MasterStore((make_layout(layer),), fmt)
    compile_kernel(store.tiles[0])
    store.close()
