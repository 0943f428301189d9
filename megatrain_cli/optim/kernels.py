"""AdamW on flat arrays: one fused pass per master mode, compiled by Numba to machine code.

[Note: Blocks] Each kernel works through its arrays in blocks of 512 elements with a scratch block
in L1, in three short loops: unscale the gradient; moments and the change they ask for; apply the
change to the master. Fused into one loop, five arrays of which four are written need more aliasing
checks than LLVM is willing to make, and the loop stays scalar: 0.30 G parameters/s on one core
against 0.77 in blocks (one core of a Xeon with AVX-512, fp32_split).

[Note: Same bits everywhere] No fastmath, so LLVM neither reorders sums nor fuses a multiplication
into an addition. What is left (+ - * / sqrt) is correctly rounded by IEEE 754 on any machine: an
element's result depends neither on the vector width nor on where the arrays were cut.

[Note: Tiny moments] A row of the embedding whose token does not come up keeps shrinking its moments
until they are subnormal, and there they stay: rounding stops the decay. Arithmetic on subnormals
takes x86 cores more than a hundred cycles; such rows ran 8 to 14 times slower (same Xeon). So a
first moment below 2**-100 and a second below 2**-126 become 0. With an `eps` of any use neither
matters by then: 2**-100 over `eps` moves no master, and a root of 2**-63 adds nothing to `eps`.
Telling the core to flush subnormals instead would also flush those of the masters, which are kept
exactly.

Operations and their order are those of `torch.optim.AdamW`'s single-tensor path
(`torch/optim/adam.py`, `_single_tensor_adam`). BF16 arrays come as `uint16`, their bit patterns.
All arrays of a call are contiguous and equally long.

[Note: Chunks] Many threads call one kernel with the same arguments. Inside, each takes the next
chunk that nobody has taken until none is left, by an atomic addition to a counter that they share;
Numba releases the GIL all the while. Handing the same chunks out from Python, as tasks of a pool
with a wait behind each tile, reached 3.8 to 4.3 G parameters/s where a prototype of
this reached 5.2 to 5.5 (fp32_split, 15 and 16 threads on the 16 cores of an H200's host, whose RAM
is then the limit).
Which thread does a chunk, and how the chunks are cut, changes no bit.

Numba's cache notices changes of this file only; keep everything that kernels call in here.
"""

from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar, cast

import numba
import numpy as np
from llvmlite.ir import IRBuilder, Value
from numba import types
from numba.core.base import BaseContext
from numba.core.typing.context import Context
from numba.core.typing.templates import Signature
from numba.extending import intrinsic
from numpy.typing import NDArray

P = ParamSpec("P")
R = TypeVar("R")

U16 = NDArray[np.uint16]
I16 = NDArray[np.int16]
I64 = NDArray[np.int64]
F32 = NDArray[np.float32]
Scalars = tuple[np.float32, ...]

# What threads that call a kernel together share: chunks, `(n, 3)`, each row a start, an end (both
# counted in the arrays of the call) and whether weight decay applies; the number of the next chunk
# to take, `(1,)`; the tile's element that the arrays begin with.
Work = tuple[I64, I64, int]

BLOCK = 512
_QUIET_NAN = np.uint32(0x7FC00000)
_INFINITY = np.uint32(0x7F800000)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_SIGN = np.uint32(0x80000000)
SMALLEST_FIRST = np.float32(2.0**-100)
SMALLEST_SECOND = np.float32(2.0**-126)


def _inlined(function: Callable[P, R]) -> Callable[P, R]:
    # Numba has no types of its own. Division by 0 gives infinity, as in torch, without a check.
    return cast(Callable[P, R], numba.njit(nogil=True, error_model="numpy")(function))


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compile at the first call; keep the machine code on disk where some folder allows it.

    Numba keys its cache by CPU and writes files whole, so neither another machine nor another
    process that starts at the same time can hand us something unusable.
    """
    try:
        made = numba.njit(nogil=True, error_model="numpy", cache=True)(function)
    except RuntimeError:
        # Neither this folder nor the user's cache folder can be written: compile at each start.
        return _inlined(function)
    return cast(Callable[P, R], made)


def _fetch_add_lowered(
    typing: Context, counter: types.Array, amount: types.Integer
) -> tuple[Signature, Callable[..., Value]]:
    def lower(
        context: BaseContext, builder: IRBuilder, signature: Signature, args: tuple[Value, ...]
    ) -> Value:
        array = context.make_array(signature.args[0])(context, builder, value=args[0])
        return builder.atomic_rmw("add", array.data, args[1], "seq_cst")

    return types.int64(counter, types.int64), lower


fetch_add = cast(Callable[[I64, int], int], intrinsic(_fetch_add_lowered))
"""Add to a counter `(1,)` and return what it was before, in one step that no thread can split."""


@_inlined
def _blocks(work: Work) -> Iterator[tuple[int, int, bool]]:
    # Start, end and decay of every block of every chunk that the calling thread gets. Blocks end
    # at multiples of BLOCK of the tile, and so never straddle a multiple of 2**32.
    chunks, next_chunk, first = work
    taken = fetch_add(next_chunk, 1)
    while taken < len(chunks):
        start, chunk_end, decay = chunks[taken]
        while start < chunk_end:
            end = min(start + BLOCK - (first + start) % BLOCK, chunk_end)
            yield start, end, decay != 0
            start = end
        taken = fetch_add(next_chunk, 1)


@_inlined
def _widen(bf16: np.uint16) -> np.float32:
    return np.uint32(np.uint32(bf16) << np.uint32(16)).view(np.float32)


@_inlined
def _quiet_bits(value: np.float32) -> np.uint32:
    # The value's bits; any NaN as the quiet NaN of its sign, so that rounding cannot overflow.
    bits = np.float32(value).view(np.uint32)
    nan = np.uint32((bits & _SIGN) | _QUIET_NAN)
    return nan if np.uint32(bits & _MAGNITUDE) > _INFINITY else bits


@_inlined
def _nearest_even(value: np.float32) -> np.uint16:
    bits = _quiet_bits(value)
    odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    return np.uint16(np.uint32(bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@_inlined
def _unscale_bf16(gradient: U16, scratch: F32, scale: np.float32) -> None:
    for i in range(gradient.size):
        scratch[i] = _widen(gradient[i]) * scale


@_inlined
def _unscale_fp32(gradient: F32, scratch: F32, scale: np.float32) -> None:
    for i in range(gradient.size):
        scratch[i] = gradient[i] * scale


@_inlined
def _moments(scratch: F32, exp_avg: F32, exp_avg_sq: F32, scalars: Scalars) -> None:
    # Replaces the gradient in scratch by the change to subtract from the master.
    _, _, lerp, lerp_rest, beta2, beta2_rest, sqrt_correction2, eps, step_size = scalars
    for i in range(exp_avg.size):
        gradient = scratch[i]
        # torch.lerp: the form that is exact at the nearer end.
        if lerp < np.float32(0.5):
            first = exp_avg[i] + lerp * (gradient - exp_avg[i])
        else:
            first = gradient - (gradient - exp_avg[i]) * lerp_rest
        second = exp_avg_sq[i] * beta2 + (beta2_rest * gradient) * gradient
        # See [Note: Tiny moments]; a NaN is not below and stays.
        first = np.float32(0.0) if np.abs(first) < SMALLEST_FIRST else first
        second = np.float32(0.0) if second < SMALLEST_SECOND else second
        exp_avg[i] = first
        exp_avg_sq[i] = second
        scratch[i] = (step_size * first) / (np.sqrt(second) / sqrt_correction2 + eps)


@_inlined
def _apply_split(weights: U16, remainder: I16, change: F32, decay: np.float32) -> None:
    # `store.split`: the BF16 nearest to the master, ties away from zero, and what it lacks.
    for i in range(weights.size):
        old = np.uint32(np.uint32(np.uint32(weights[i]) << np.uint32(16)) + np.int32(remainder[i]))
        bits = _quiet_bits(old.view(np.float32) * decay - change[i])
        high = np.uint32(np.uint32(bits + np.uint32(0x8000)) >> np.uint32(16))
        weights[i] = np.uint16(high)
        remainder[i] = np.int16(np.uint32(bits - np.uint32(high << np.uint32(16))))


@_inlined
def _apply_bf16(weights: U16, change: F32, decay: np.float32) -> None:
    for i in range(weights.size):
        weights[i] = _nearest_even(_widen(weights[i]) * decay - change[i])


@_inlined
def _mixed(state: np.uint64) -> np.uint64:
    # SplitMix64's finaliser (Steele, Lea and Flood, 2014).
    state = np.uint64((state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9))
    state = np.uint64((state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB))
    return np.uint64(state ^ (state >> np.uint64(31)))


@_inlined
def _apply_stochastic(
    weights: U16, change: F32, decay: np.float32, key: np.uint64, first: np.uint64
) -> None:
    # Adds 16 random bits below the BF16 and cuts off: rounds up as often as the value is near.
    # The bits are a hash of (key, element index): 32-bit arithmetic, which vectorises, with the
    # mixing steps of lowbias32 (Wellons, "Prospecting for Hash Functions", 2018). A block never
    # straddles a multiple of 2**32 (see `_blocks`), so the upper half is in the key.
    words = _mixed(key ^ np.uint64(first >> np.uint64(32)))
    word0 = np.uint32(words & np.uint64(0xFFFFFFFF))
    word1 = np.uint32(words >> np.uint64(32))
    start = np.uint32(first & np.uint64(0xFFFFFFFF))
    for i in range(weights.size):
        x = np.uint32(np.uint32(start + np.uint32(i)) ^ word0)
        x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(16))) * np.uint32(0x7FEB352D))
        x = np.uint32(x ^ word1)
        x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(15))) * np.uint32(0x846CA68B))
        bits = _quiet_bits(_widen(weights[i]) * decay - change[i])
        # Infinity and NaN have zeros below, and adding less than 2**16 leaves them as they are.
        weights[i] = np.uint16(np.uint32(bits + np.uint32(x >> np.uint32(16))) >> np.uint32(16))


@_inlined
def _apply_fp32(master: F32, change: F32, decay: np.float32) -> None:
    for i in range(master.size):
        master[i] = master[i] * decay - change[i]


@_inlined
def _round_weights(weights: U16, master: F32) -> None:
    for i in range(weights.size):
        weights[i] = _nearest_even(master[i])


@_inlined
def _factor(scalars: Scalars, decay: bool) -> np.float32:
    return scalars[1] if decay else np.float32(1.0)


@compiled
def adamw_split(
    work: Work, weights: U16, remainder: I16, gradient: U16, m: F32, v: F32, scalars: Scalars
) -> None:
    """BF16 weights plus remainder: an exact FP32 master."""
    scratch = np.empty(BLOCK, np.float32)
    for start, end, decay in _blocks(work):
        _unscale_bf16(gradient[start:end], scratch, scalars[0])
        _moments(scratch, m[start:end], v[start:end], scalars)
        factor = _factor(scalars, decay)
        _apply_split(weights[start:end], remainder[start:end], scratch, factor)


@compiled
def adamw_bf16(work: Work, weights: U16, gradient: U16, m: F32, v: F32, scalars: Scalars) -> None:
    """BF16 weights alone, rounded to nearest, ties to even."""
    scratch = np.empty(BLOCK, np.float32)
    for start, end, decay in _blocks(work):
        _unscale_bf16(gradient[start:end], scratch, scalars[0])
        _moments(scratch, m[start:end], v[start:end], scalars)
        _apply_bf16(weights[start:end], scratch, _factor(scalars, decay))


@compiled
def adamw_stochastic(
    work: Work, weights: U16, gradient: U16, m: F32, v: F32, scalars: Scalars, key: np.uint64
) -> None:
    """BF16 weights alone, rounded at random."""
    scratch = np.empty(BLOCK, np.float32)
    for start, end, decay in _blocks(work):
        _unscale_bf16(gradient[start:end], scratch, scalars[0])
        _moments(scratch, m[start:end], v[start:end], scalars)
        at = np.uint64(work[2] + start)
        _apply_stochastic(weights[start:end], scratch, _factor(scalars, decay), key, at)


@compiled
def adamw_fp32(work: Work, master: F32, gradient: F32, m: F32, v: F32, scalars: Scalars) -> None:
    """FP32 weights, which are their own master."""
    scratch = np.empty(BLOCK, np.float32)
    for start, end, decay in _blocks(work):
        _unscale_fp32(gradient[start:end], scratch, scalars[0])
        _moments(scratch, m[start:end], v[start:end], scalars)
        _apply_fp32(master[start:end], scratch, _factor(scalars, decay))


@compiled
def adamw_fp32_bf16(
    work: Work, weights: U16, master: F32, gradient: U16, m: F32, v: F32, scalars: Scalars
) -> None:
    """An FP32 master beside BF16 weights, which are rounded to nearest, ties to even."""
    scratch = np.empty(BLOCK, np.float32)
    for start, end, decay in _blocks(work):
        _unscale_bf16(gradient[start:end], scratch, scalars[0])
        _moments(scratch, m[start:end], v[start:end], scalars)
        _apply_fp32(master[start:end], scratch, _factor(scalars, decay))
        _round_weights(weights[start:end], master[start:end])
