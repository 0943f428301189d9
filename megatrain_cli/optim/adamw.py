"""One AdamW step as a value, and its application to a range of a tile.

Adam here is a pure function of (master, moments, gradient, step, rate): bias corrections come from
the integer step in FP64 every time, never from a running product that a resumed run would have to
guess.
"""

import contextlib
import math
from dataclasses import dataclass
from typing import assert_never

import numpy as np
import torch

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

    def decay_factor(self, decay: bool) -> float:
        """What the master is multiplied with before the change is subtracted."""
        return 1.0 - self.lr * self.weight_decay if decay else 1.0

    def scalars(self, decay: bool) -> kernels.Scalars:
        """The kernels' FP32 scalars, each rounded once from FP64 as torch does."""
        lerp = np.float32(1.0 - self.beta1)
        return (
            np.float32(self.grad_scale),
            np.float32(self.decay_factor(decay)),
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


def update_range(
    tile: LayerTile, gradient: torch.Tensor, start: int, step: AdamStep, *, decay: bool
) -> None:
    """Update elements `[start, start + n)` of a tile, on the calling thread.

    Any two ranges that do not overlap may be updated at the same time, by any threads: each
    element's new bits depend on that element alone.

    Args:
        tile: Its weights, and whatever else it has of master and moments, change in place.
        gradient: `(n,)`, compute dtype, contiguous, before scaling; only read.
        start: The first element.
        step: The optimizer step.
        decay: Whether weight decay applies here.
    """
    at = slice(start, start + gradient.numel())
    weights, m, v = tile.weights[at], _floats(tile.exp_avg[at]), _floats(tile.exp_avg_sq[at])
    if weights.numel() != gradient.numel() or weights.dtype != gradient.dtype:
        raise InternalError(
            f"{gradient.numel()} gradients of {gradient.dtype} for {weights.numel()} weights of "
            f"{weights.dtype}."
        )
    scalars = step.scalars(decay)
    if weights.dtype == torch.float32:
        kernels.adamw_fp32(_floats(weights), _floats(gradient), m, v, scalars)
        return
    bits, gradient_bits = _bits(weights), _bits(gradient)
    match tile.format.master:
        case "fp32_split":
            assert tile.remainder is not None
            remainder: kernels.I16 = tile.remainder[at].numpy()
            kernels.adamw_split(bits, remainder, gradient_bits, m, v, scalars)
        case "bf16":
            kernels.adamw_bf16(bits, gradient_bits, m, v, scalars)
        case "bf16_stochastic":
            key = np.uint64(step.rounding_key(tile.index))
            kernels.adamw_stochastic(bits, gradient_bits, m, v, scalars, key, np.uint64(start))
        case "fp32":
            assert tile.master is not None
            kernels.adamw_fp32_bf16(bits, _floats(tile.master[at]), gradient_bits, m, v, scalars)
        case _:
            assert_never(tile.format.master)


def _bits(bf16: torch.Tensor) -> kernels.U16:
    # NumPy has no BF16; the kernels take the bit patterns of the same memory.
    array: kernels.U16 = bf16.detach().view(torch.uint16).numpy()
    return array


def _floats(fp32: torch.Tensor) -> kernels.F32:
    array: kernels.F32 = fp32.detach().numpy()
    return array


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
