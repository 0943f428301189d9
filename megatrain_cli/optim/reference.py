"""AdamW in plain torch on whole tensors: what the kernels must equal, bit for bit.

Slow and short. Each line is one correctly rounded FP32 operation; torch's own fused operations
(`lerp_`, `addcmul_`, `addcdiv_`) may contract a multiplication and an addition into one rounding,
depending on the machine, and are equal to about 1e-7 only.
"""

import numpy as np
import torch

from megatrain_cli.optim.adamw import AdamStep
from megatrain_cli.optim.kernels import SMALLEST_FIRST, SMALLEST_SECOND
from megatrain_cli.store.split import split_fp32


def adamw_reference(
    master: torch.Tensor,
    gradient: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    step: AdamStep,
    *,
    decay: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The new `(master, exp_avg, exp_avg_sq)`, FP32; the arguments are left alone.

    Args:
        master: FP32.
        gradient: Any floating dtype, unscaled.
        exp_avg: FP32.
        exp_avg_sq: FP32.
        step: As for the kernels.
        decay: Whether weight decay applies.
    """
    scalars = [torch.tensor(float(value)) for value in step.scalars]
    scale, factor, lerp, lerp_rest, beta2, beta2_rest, correction2, eps, step_size = scalars
    scaled = gradient.to(torch.float32) * scale
    if lerp < 0.5:
        first = exp_avg + lerp * (scaled - exp_avg)
    else:
        first = scaled - (scaled - exp_avg) * lerp_rest
    second = exp_avg_sq * beta2 + (beta2_rest * scaled) * scaled
    # [Note: Tiny moments] in optim.kernels
    first = torch.where(first.abs() < float(SMALLEST_FIRST), 0.0, first)
    second = torch.where(second < float(SMALLEST_SECOND), 0.0, second)
    # Through FP64: torch's FP32 root is off by one bit in 0.6 % of values (measured, MKL's VML).
    # A root that is right to 53 bits rounds to the right 24 (Figueroa, "When is double rounding
    # innocuous?", 1995).
    root = second.to(torch.float64).sqrt().to(torch.float32)
    change = (step_size * first) / (root / correction2 + eps)
    return (master * factor if decay else master) - change, first, second


def nearest_bf16(master: torch.Tensor) -> torch.Tensor:
    """FP32 to the nearest BF16, ties away from zero: the weights of `fp32_split`."""
    return split_fp32(master)[0]


def stochastic_bf16(master: torch.Tensor, key: int, first: int = 0) -> torch.Tensor:
    """FP32 `(n,)` to BF16, rounded at random with the bits of elements `[first, first + n)`.

    Args:
        master: FP32, finite.
        key: `AdamStep.rounding_key(layer index)`.
        first: Index in the tile of the first element.
    """
    index = first + np.arange(master.numel(), dtype=np.uint64)
    words = _mixed(np.uint64(key) ^ (index >> np.uint64(32)))
    x = index.astype(np.uint32) ^ words.astype(np.uint32)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x ^= (words >> np.uint64(32)).astype(np.uint32)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    bits = master.numpy().view(np.uint32) + (x >> np.uint32(16))
    high = torch.from_numpy((bits >> np.uint32(16)).astype(np.uint16))
    return high.view(torch.bfloat16)


def _mixed(
    state: np.ndarray[tuple[int, ...], np.dtype[np.uint64]],
) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
