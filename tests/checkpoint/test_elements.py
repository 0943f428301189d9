"""Numbers from bit patterns: equal, bit for bit, to torch's casts and to the store's masters."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.checkpoint.elements import as_array, join_master, nearest_bf16, widen
from megatrain_cli.store.split import split_fp32

ALL_BF16 = np.arange(1 << 16, dtype=np.uint16)


def test_every_bf16_widens_to_what_torch_makes_of_it() -> None:
    found = widen("BF16", as_array("BF16", ALL_BF16.tobytes()))
    wanted = torch.from_numpy(ALL_BF16.view(np.int16)).view(torch.bfloat16).to(torch.float32)
    assert np.array_equal(found.view(np.int32), wanted.view(torch.int32).numpy())


def test_every_f16_widens_to_what_torch_makes_of_it() -> None:
    found = widen("F16", as_array("F16", ALL_BF16.tobytes()))
    wanted = torch.from_numpy(ALL_BF16.view(np.float16)).to(torch.float32).numpy()
    assert np.array_equal(found, wanted, equal_nan=True)


@pytest.mark.parametrize("low", [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_rounding_is_that_of_torch_for_every_high_half(low: int) -> None:
    bits = (ALL_BF16.astype(np.uint32) << np.uint32(16)) + np.uint32(low)
    values = bits.view(np.float32)
    found = nearest_bf16(values)
    wanted = torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.int16).numpy()
    nan = np.isnan(values)
    assert np.array_equal(found[~nan], wanted.view(np.uint16)[~nan])
    assert np.isnan(widen("BF16", found)[nan]).all()
    assert np.array_equal(found[nan] >> 15, (bits[nan] >> 31).astype(np.uint16))


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_joining_gives_back_what_the_store_has_split(patterns: list[int]) -> None:
    values = np.array(patterns, dtype=np.uint32).view(np.float32)
    high, low = split_fp32(torch.from_numpy(values))
    found = join_master(high.view(torch.int16).numpy().view(np.uint16), low.numpy())
    nan = np.isnan(values)
    assert np.array_equal(found.view(np.uint32)[~nan], values.view(np.uint32)[~nan])
    assert np.isnan(found[nan]).all()
