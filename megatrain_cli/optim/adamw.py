"""One AdamW step as a value, and its application to a range of a tile.

Adam here is a pure function of (master, moments, gradient, step, rate): bias corrections come from
the integer step in FP64 every time, never from a running product that a resumed run would have to
guess.
"""

import contextlib
import math
from dataclasses import dataclass
from typing import Any, assert_never

import numpy as np
import torch
from numpy.typing import NDArray

from megatrain_cli.errors import InternalError
from megatrain_cli.optim import kernels
from megatrain_cli.plan.tiles import TileFormat
from megatrain_cli.store.master import LayerTile

_WORD = (1 << 64) - 1


@dataclass(frozen=True)
class AdamStep:
    """All that one optimizer step needs besides the tiles.

    Attributes:
        step: Of this update, counted from 1.
        lr: Learning rate of this update.
        weight_decay: Decoupled (Loshchilov and Hutter, 2019): the master shrinks by `lr` times it.
        grad_scale: Multiplies every gradient first; the clip coefficient, usually.
        seed: Of random rounding, with `bf16_stochastic`.
    """

    step: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_scale: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.step < 1:
            raise InternalError(f"Optimizer steps are counted from 1, not {self.step}.")

    @property
    def step_size(self) -> float:
        """`lr / (1 - beta1**step)`, in FP64."""
        return self.lr / (1.0 - self.beta1**self.step)

    @property
    def sqrt_correction2(self) -> float:
        """`sqrt(1 - beta2**step)`, in FP64."""
        return math.sqrt(1.0 - self.beta2**self.step)

    @property
    def decay_factor(self) -> float:
        """What a master that decays is multiplied with before the change is subtracted."""
        return 1.0 - self.lr * self.weight_decay

    @property
    def scalars(self) -> kernels.Scalars:
        """The kernels' FP32 scalars, each rounded once from FP64 as torch does."""
        lerp = np.float32(1.0 - self.beta1)
        return (
            np.float32(self.grad_scale),
            np.float32(self.decay_factor),
            lerp,
            np.float32(np.float32(1.0) - lerp),
            np.float32(self.beta2),
            np.float32(1.0 - self.beta2),
            np.float32(self.sqrt_correction2),
            np.float32(self.eps),
            np.float32(self.step_size),
        )

    def rounding_key(self, layer_index: int) -> int:
        """64 bits that differ for every (seed, step, layer)."""
        key = 0
        for word in (self.seed, self.step, layer_index):
            key = _splitmix(key ^ (word & _WORD))
        return key


def _splitmix(state: int) -> int:
    # SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014).
    state = (state + 0x9E3779B97F4A7C15) & _WORD
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _WORD
    return state ^ (state >> 31)


class TilePiece:
    """Elements `[start, end)` of a tile as the kernels take them.

    Made once a piece and kept: slicing tensors costs tens of microseconds under the GIL, for which
    all threads would wait. The arrays keep the tile's memory alive.

    Args:
        tile: Where the piece lies.
        start: The first element.
        end: One past the last element.
        chunks: `(n, 3)`, each row a start, an end and whether weight decay applies; counted from
            the piece's first element. Elements in no chunk are left alone.
    """

    def __init__(self, tile: LayerTile, start: int, end: int, chunks: kernels.I64) -> None:
        self.tile = tile
        self.name = _piece_name(tile, start, end)
        self._start = start
        self._chunks = chunks
        at = slice(start, end)
        self._weights = as_array(tile.weights)[at]
        self._exp_avg = as_array(tile.exp_avg)[at]
        self._exp_avg_sq = as_array(tile.exp_avg_sq)[at]
        self._rest = None if tile.remainder is None else as_array(tile.remainder)[at]
        self._master = None if tile.master is None else as_array(tile.master)[at]

    def work_on(
        self,
        next_chunk: kernels.I64,
        gradient: NDArray[Any],
        scalars: kernels.Scalars,
        rounding_key: int,
    ) -> None:
        """Update chunks that nobody has taken, on the calling thread, until none is left.

        Any number of threads may call this at the same time with the same arguments. When it
        returns, the others may still be at their last chunks.

        Args:
            next_chunk: `(1,)`, zero before the first call of an update.
            gradient: `(end - start,)`, as `as_array` makes it of the compute dtype; only read.
            scalars: `AdamStep.scalars`.
            rounding_key: `AdamStep.rounding_key` of the tile; used by `bf16_stochastic` alone.
        """
        work = (self._chunks, next_chunk, self._start)
        weights, m, v = self._weights, self._exp_avg, self._exp_avg_sq
        if self.tile.format.compute_dtype == "float32":
            kernels.adamw_fp32(work, weights, gradient, m, v, scalars)
            return
        match self.tile.format.master:
            case "fp32_split":
                assert self._rest is not None
                kernels.adamw_split(work, weights, self._rest, gradient, m, v, scalars)
            case "bf16":
                kernels.adamw_bf16(work, weights, gradient, m, v, scalars)
            case "bf16_stochastic":
                key = np.uint64(rounding_key)
                kernels.adamw_stochastic(work, weights, gradient, m, v, scalars, key)
            case "fp32":
                assert self._master is not None
                kernels.adamw_fp32_bf16(work, weights, self._master, gradient, m, v, scalars)
            case _:
                assert_never(self.tile.format.master)


def _piece_name(tile: LayerTile, start: int, end: int) -> str:
    # `a.weight to c.weight of layer-00003`, for messages.
    entries = tile.layout.entries
    inside = [e.param.name for e in entries if max(start, e.offset) < min(end, e.end)]
    ends = dict.fromkeys((*inside[:1], *inside[-1:]))
    return " of ".join(filter(None, (" to ".join(ends), tile.layout.layer.name)))


def as_array(tensor: torch.Tensor) -> NDArray[Any]:
    """The tensor's memory as NumPy sees it. NumPy has no BF16: bit patterns, `uint16`."""
    tensor = tensor.detach()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def check_gradient(tile: LayerTile, gradient: torch.Tensor, start: int) -> None:
    """Refuse a gradient of another kind or outside the tile: kernels do not look.

    Raises:
        InternalError: Always a fault of this program.
    """
    end = start + gradient.numel()
    if not 0 <= start <= end <= tile.layout.numel or gradient.dtype != tile.weights.dtype:
        raise InternalError(
            f"{gradient.numel()} gradients of {gradient.dtype} from element {start} of a tile of "
            f"{tile.layout.numel} weights of {tile.weights.dtype}."
        )
    if gradient.dim() != 1 or not gradient.is_contiguous():
        # Numba would compile another kernel for it, in the middle of a run.
        raise InternalError(
            f"A gradient of shape {tuple(gradient.shape)} with strides {gradient.stride()} "
            "is not flat."
        )


def update_range(
    tile: LayerTile, gradient: torch.Tensor, start: int, step: AdamStep, *, decay: bool
) -> None:
    """Update elements `[start, start + n)` of a tile once, on the calling thread.

    Args:
        tile: Its weights, and whatever else it has of master and moments, change in place.
        gradient: `(n,)`, compute dtype, contiguous, before scaling; only read.
        start: The first element.
        step: The optimizer step.
        decay: Whether weight decay applies here.
    """
    check_gradient(tile, gradient, start)
    whole = np.array([[0, gradient.numel(), decay]], np.int64)
    piece = TilePiece(tile, start, start + gradient.numel(), whole)
    key = step.rounding_key(tile.index)
    piece.work_on(np.zeros(1, np.int64), as_array(gradient), step.scalars, key)


def compile_kernel(tile: LayerTile) -> None:
    """Compile the kernel for the format of `tile`, a spare one: its contents are changed.

    Takes about a second when the code is not in Numba's cache.
    """
    gradient = torch.zeros_like(tile.weights)
    step = AdamStep(step=1, lr=0.0, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0)
    # Numba keeps the compiled code before it saves it, so after a save that failed (a full disk)
    # the second call just runs.
    with contextlib.suppress(OSError):
        update_range(tile, gradient, 0, step, decay=True)
    update_range(tile, gradient, 0, step, decay=True)


ALL_FORMATS = (
    TileFormat("bfloat16", "fp32_split", keep_gradient=False),
    TileFormat("bfloat16", "bf16", keep_gradient=False),
    TileFormat("bfloat16", "bf16_stochastic", keep_gradient=False),
    TileFormat("bfloat16", "fp32", keep_gradient=False),
    TileFormat("float32", "fp32", keep_gradient=False),
)
