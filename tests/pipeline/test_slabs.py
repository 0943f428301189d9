"""Slabs: pieces cover a run exactly once."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.errors import DeviceError
from megatrain_cli.pipeline.slabs import SlabPool, piece_range
from tests.store.cudart import fake_driver


@given(st.integers(1, 10_000), st.integers(1, 3_000))
def test_pieces_cover_a_run_without_gap_or_overlap(numel: int, slab_numel: int) -> None:
    pieces = [piece_range(numel, p, slab_numel) for p in range(-(-numel // slab_numel))]
    assert pieces[0][0] == 0
    assert pieces[-1][1] == numel
    assert all(a[1] == b[0] for a, b in pairwise(pieces))
    assert all(0 < end - start <= slab_numel for start, end in pieces)


def test_a_run_without_pieces_moves_whole() -> None:
    assert piece_range(700, None, 128) == (0, 700)


def test_slabs_are_apart_from_each_other() -> None:
    pool = SlabPool(3, 100, torch.bfloat16, pin=False)
    for i in range(3):
        pool[i].fill_(i)
    assert [pool[i].sum().item() for i in range(3)] == [0, 100, 200]
    pool.close()


@pytest.mark.parametrize("refuse", [1, 2, 3])
def test_if_one_slab_is_refused_none_stays_locked(
    refuse: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cudart = fake_driver(monkeypatch, refuse)
    with pytest.raises(DeviceError, match=r"^gradient slabs: .*`pipeline\.grad_slabs`"):
        SlabPool(3, 100, torch.bfloat16, pin=True)
    assert cudart.locked == {}
    assert cudart.last_error == 0
