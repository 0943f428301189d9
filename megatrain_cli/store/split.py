"""An FP32 value as the nearest BF16 plus a signed 16-bit remainder, exactly.

With `bits` the FP32 bit pattern as an unsigned integer:

    high = (bits + 0x8000) >> 16          the BF16 weight
    low  = bits - (high << 16)            the remainder, -32768 ... 32767
    bits = (high << 16) + low             the master again

`high` is the nearest BF16 because the patterns of one sign are ordered like their magnitudes.
Ties go *away from zero*. Rounding ties to even, as hardware does, cannot be exact here: an even
`high` would then be reached from 32768 below and from 32768 above, 65,537 remainders, one more than
16 bits tell apart. So one value in 131,072 (a tie above an even BF16) becomes the other of its two
equally near neighbours than hardware would choose.

Near the largest finite value `high` may be infinite while `low` still restores the finite master,
as rounding an FP32 master to BF16 would do. Infinities split into themselves and 0. A NaN becomes
the quiet NaN of the same sign and 0, whatever its payload: adding 0x8000 to a large payload would
carry into the sign and make the weight a zero.

These are the reference; the optimizer's kernels do the same arithmetic.
"""

import torch

_QUIET_NAN = 0x7FC00000
_INFINITY = 0x7F800000
_MAGNITUDE = 0x7FFFFFFF


def split_fp32(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`values` (FP32, any shape) as new tensors of that shape: `(bfloat16, int16 remainder)`."""
    signed = values.contiguous().view(torch.int32)
    nan = (signed & _MAGNITUDE) > _INFINITY
    sign = signed & ~_MAGNITUDE
    signed = torch.where(nan, sign | _QUIET_NAN, signed)
    # Arithmetic shift instead of a logical one: equal in the 16 bits that are kept.
    high = (signed + 0x8000) >> 16
    low = signed - (high << 16)
    return high.to(torch.int16).view(torch.bfloat16), low.to(torch.int16)


def join_fp32(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """The FP32 values, bit for bit, that `split_fp32` was given (NaN payloads aside)."""
    bits = (high.contiguous().view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)
    return bits.view(torch.float32)
