"""`fp32_split` is exact: nearest BF16 plus 16 bits restore every FP32 value, bit for bit."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.store.split import join_fp32, split_fp32


def from_bits(bits: list[int] | torch.Tensor) -> torch.Tensor:
    wide = torch.as_tensor(bits, dtype=torch.int64)
    return torch.where(wide >= 1 << 31, wide - (1 << 32), wide).to(torch.int32).view(torch.float32)


def assert_exact(values: torch.Tensor) -> None:
    high, low = split_fp32(values)
    assert high.dtype == torch.bfloat16
    assert low.dtype == torch.int16
    back = join_fp32(high, low)
    nan = values.isnan()
    assert torch.equal(back.view(torch.int32)[~nan], values.view(torch.int32)[~nan])
    assert back[nan].isnan().all()
    assert high[nan].isnan().all()
    assert (low[nan] == 0).all()
    assert torch.equal(back.signbit(), values.signbit())


def test_every_bf16_with_every_kind_of_remainder_is_restored() -> None:
    high = torch.arange(1 << 16, dtype=torch.int64) << 16
    for low in (0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF):
        assert_exact(from_bits(high + low))


def test_every_remainder_is_restored_at_the_ends_of_the_range() -> None:
    low = torch.arange(1 << 16, dtype=torch.int64)
    for high in (0x0000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x7F7F, 0x7F80, 0x7FFF, 0x8000, 0xFFFF):
        assert_exact(from_bits((high << 16) + low))


@given(st.lists(st.integers(0, (1 << 32) - 1), min_size=1, max_size=100))
def test_any_bit_pattern_is_restored(bits: list[int]) -> None:
    assert_exact(from_bits(bits))


@given(st.lists(st.integers(0, (1 << 32) - 1), min_size=1, max_size=100))
def test_the_weight_is_the_nearest_bf16_and_only_ties_differ_from_hardware(bits: list[int]) -> None:
    values = from_bits(bits)
    values = values[values.isfinite()]
    high, _ = split_fp32(values)
    tie = (values.view(torch.int32) & 0xFFFF) == 0x8000
    hardware = values.to(torch.bfloat16)
    assert torch.equal(high[~tie], hardware[~tie])
    finite = tie & high.isfinite()
    assert (high[finite].abs().double() > values[finite].abs().double()).all()
    below = values.double() - hardware.double()
    assert torch.equal((high.double() - values.double()).abs()[finite], below.abs()[finite])


def test_nan_stays_nan_and_infinity_stays_infinity() -> None:
    values = from_bits([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FFF8000, 0x7F800000, 0xFF800000])
    high, low = split_fp32(values)
    assert high.view(torch.int16).tolist() == [
        0x7FC0, 0x7FC0, 0xFFC0 - 0x10000, 0x7FC0, 0x7F80, 0xFF80 - 0x10000
    ]  # fmt: skip
    assert low.tolist() == [0] * 6


def test_the_largest_finite_values_round_to_infinity_but_are_restored() -> None:
    values = from_bits([0x7F7FFFFF, 0xFF7FFFFF])
    high, low = split_fp32(values)
    assert high.isinf().all()
    assert torch.equal(join_fp32(high, low), values)


def test_shape_is_kept_and_the_argument_may_be_strided() -> None:
    values = torch.randn(5, 7).T
    high, low = split_fp32(values)
    assert high.shape == low.shape == (7, 5)
    assert torch.equal(join_fp32(high, low), values)
