"""An arena: exact size, cuts that never overlap, RAM only for pages that were touched."""

import resource
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.errors import InternalError, PlanError
from megatrain_cli.plan.tiles import PAGE_BYTES
from megatrain_cli.store.arena import Arena
from megatrain_cli.units import round_up


def resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * resource.getpagesize()


@given(st.lists(st.integers(0, 3 * PAGE_BYTES), min_size=1, max_size=12))
def test_cuts_are_aligned_zero_and_never_overlap(sizes: list[int]) -> None:
    total = sum(round_up(size, PAGE_BYTES) for size in sizes)
    arena = Arena(max(total, 1))
    cuts = [arena.take(size) for size in sizes]
    assert arena.free_bytes == max(total, PAGE_BYTES) - total
    for number, cut in enumerate(cuts, start=1):
        assert cut.numel() == 0 or cut.data_ptr() % PAGE_BYTES == 0
        assert not cut.any()
        cut.fill_(number)
    for number, cut in enumerate(cuts, start=1):
        assert (cut == number).all()


def test_taking_more_than_there_is_is_a_bug() -> None:
    arena = Arena(2 * PAGE_BYTES)
    arena.take(PAGE_BYTES + 1)
    with pytest.raises(InternalError, match="0 left, and 1 were asked"):
        arena.take(1)
    with pytest.raises(InternalError, match="0 bytes"):
        Arena(0)


def test_untouched_pages_cost_no_ram() -> None:
    before = resident_bytes()
    arena = Arena(1 << 30)
    arena.take(1 << 29)[:PAGE_BYTES].fill_(1)
    assert resident_bytes() - before < 64 << 20


def test_more_than_the_system_has_is_refused_with_the_number() -> None:
    with pytest.raises(PlanError, match=r"refused to map \d+\.\d GiB"):
        Arena(1 << 60)


def test_a_view_outlives_the_arena() -> None:
    arena = Arena(PAGE_BYTES)
    cut = arena.take(10)
    cut.fill_(7)
    arena.close()
    arena.close()
    del arena
    assert cut.tolist() == [7] * 10


def test_nothing_can_be_taken_after_close() -> None:
    arena = Arena(PAGE_BYTES)
    arena.close()
    with pytest.raises(InternalError, match="closed"):
        arena.take(1)
