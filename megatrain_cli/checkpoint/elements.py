"""Elements of stored tensors as numbers: bit patterns in, FP32 out, and back. NumPy, no torch.

NumPy has no BF16; its bit patterns come and go as `uint16`. The arithmetic of masters is that of
`store.split`, which is the reference: here it serves readers that must start without torch.
"""

import numpy as np
from numpy.typing import NDArray

from megatrain_cli.checkpoint.places import ITEM_BYTES

U16 = NDArray[np.uint16]
F32 = NDArray[np.float32]
Bits = NDArray[np.generic]

FLOATS = ("BF16", "F16", "F32")
"""Dtypes whose values FP32 holds exactly, by safetensors' name."""

_KINDS: dict[str, type[np.generic]] = {"F16": np.float16, "F32": np.float32, "I16": np.int16}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

_QUIET_NAN = np.uint32(0x7FC00000)
_SIGN = np.uint32(0x80000000)


def as_array(dtype: str, raw: bytes | memoryview) -> Bits:
    """The elements of `raw`, flat `(n,)`, without a copy; BF16 as `uint16`.

    Of other dtypes than F16, F32 and I16 they are the bit patterns, unsigned. Little-endian, as
    the format is.
    """
    kind = _KINDS.get(dtype, _UNSIGNED[ITEM_BYTES[dtype]])
    return np.frombuffer(raw, dtype=np.dtype(kind).newbyteorder("<"))


def patterns(elements: Bits) -> Bits:
    """The bit patterns of elements, unsigned, without a copy: equal where all bits are."""
    return elements.view(_UNSIGNED[elements.itemsize])


def widen(dtype: str, elements: Bits) -> F32:
    """Elements of one of `FLOATS` as FP32, exactly; F32 is returned as it is."""
    if dtype == "BF16":
        return (elements.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return elements.astype(np.float32, copy=False)


def nearest_bf16(values: F32) -> U16:
    """FP32 rounded to BF16, ties to even, as hardware does; a NaN is the quiet NaN of its sign."""
    bits = values.view(np.uint32)
    nan = np.isnan(values)
    if nan.any():  # rounding would carry a large payload into the sign
        bits = np.where(nan, (bits & _SIGN) | _QUIET_NAN, bits)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)


def join_master(high: Bits, low: Bits) -> F32:
    """The FP32 masters, bit for bit, of BF16 weights and their 16-bit remainders."""
    bits = (high.astype(np.uint32) << np.uint32(16)) + low.astype(np.int32).view(np.uint32)
    return bits.view(np.float32)


def master_values(weights: Bits, beside: Bits) -> F32:
    """The FP32 masters, exactly.

    Args:
        weights: Bit patterns of the BF16 weights.
        beside: Their remainders (`int16`), or whole FP32 masters.
    """
    if beside.dtype == np.int16:
        return join_master(weights, beside)
    return beside.view(np.float32)
