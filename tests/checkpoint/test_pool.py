"""An update takes a queued tile out of the saver's way if the pool has room; else it waits."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.checkpoint.pool import BouncePool, copy_tile
from megatrain_cli.checkpoint.save import Saver
from megatrain_cli.plan.tiles import PAGE_BYTES, tile_regions
from megatrain_cli.store.master import LayerTile, MasterStore
from tests.checkpoint.tiles import (
    ORDER,
    SPLIT,
    change,
    fill_gradients,
    make_store,
    payloads,
    regions,
    save,
    saver_of,
    snapshot_of,
)
from tests.checkpoint.trouble import stopped_at
from tests.scheduler import Watched

FIRST, *REST = ORDER


def tile_bytes(store: MasterStore, layer: int, *, gradient: bool = False) -> int:
    parts = tile_regions(store.tiles[layer].layout.numel, SPLIT)
    return sum(size for name, size in parts.items() if gradient or name != "gradient")


def update(store: MasterStore, layer: int, step: int) -> None:
    store.clock.begin_update(layer)
    for flat in regions(store.tiles[layer]):
        change(flat, step)
    store.clock.end_update(layer, step)


@contextmanager
def writing_first(
    store: MasterStore, run: Path, pool_bytes: int, step: int = 0, pending: int | None = None
) -> Iterator[tuple[Saver, Watched, threading.Event]]:
    """A saver that is writing the first layer; who waits for the clock; and lets it go on."""
    store.clock._changed = watched = Watched()
    with stopped_at(f"model-{store.tiles[FIRST].layout.layer.name}") as (disk, waits, go):
        saver = saver_of(store, run, disk, pool_bytes=pool_bytes)
        assert saver.begin(snapshot_of(store, step, pending))
        assert waits.wait(60)
        yield saver, watched, go


def test_with_room_for_all_no_update_waits_for_a_queued_layer(tmp_path: Path) -> None:
    wanted = payloads(save(make_store(), tmp_path / "still", 0))
    store = make_store()
    room = sum(tile_bytes(store, layer) for layer in REST)
    with writing_first(store, tmp_path / "run", room) as (saver, watched, go):
        for layer in REST:
            update(store, layer, 1)
        assert not watched.waits.acquire(blocking=False)
        assert saver.pool.taken_bytes == room
        go.set()
        (report,) = saver.wait()
    assert payloads(report.folder) == wanted
    assert report.stall_seconds > 0  # copies count
    assert saver.pool.taken_bytes == 0


def test_a_layer_that_is_being_written_is_waited_for_whatever_room_there_is(tmp_path: Path) -> None:
    store = make_store()
    with (
        writing_first(store, tmp_path, 1 << 20) as (saver, watched, go),
        ThreadPoolExecutor(1) as pool,
    ):
        waiting = pool.submit(update, store, FIRST, 1)
        assert watched.waits.acquire(timeout=60)
        assert not waiting.done()
        go.set()
        waiting.result(20)
        (report,) = saver.wait()
    assert report.stall_seconds > 0


@pytest.mark.parametrize("spare", ["none", "almost"])
def test_without_room_an_update_waits_until_the_layer_is_saved(spare: str, tmp_path: Path) -> None:
    wanted = payloads(save(make_store(), tmp_path / "still", 0))
    store = make_store()
    layer = REST[1]
    room = 0 if spare == "none" else tile_bytes(store, layer) - PAGE_BYTES
    with (
        writing_first(store, tmp_path / "run", room) as (saver, watched, go),
        ThreadPoolExecutor(1) as pool,
    ):
        waiting = pool.submit(update, store, layer, 1)
        assert watched.waits.acquire(timeout=60)
        assert not waiting.done()
        go.set()
        waiting.result(20)
        (report,) = saver.wait()
    assert payloads(report.folder) == wanted


def test_a_copy_made_of_a_pending_update_has_its_gradient(tmp_path: Path) -> None:
    still = make_store()
    fill_gradients(still, 3)
    still.clock.set_steps((2,) * 4)
    wanted = payloads(save(still, tmp_path / "still", 2, pending=3))
    store = make_store()
    fill_gradients(store, 3)
    store.clock.set_steps((2,) * 4)
    with writing_first(store, tmp_path / "run", 1 << 20, 2, 3) as (saver, _, go):
        for layer in REST:
            update(store, layer, 3)
            gradient = store.tiles[layer].gradient
            assert gradient is not None
            gradient.zero_()
        assert saver.pool.taken_bytes == sum(tile_bytes(store, i, gradient=True) for i in REST)
        go.set()
        (report,) = saver.wait()
    assert payloads(report.folder) == wanted


def test_a_copy_is_a_tile_of_its_own(tmp_path: Path) -> None:
    store = make_store()
    fill_gradients(store, 1)
    pool = BouncePool(1 << 20)
    for gradient in (False, True):
        tile = store.tiles[1]
        copy = pool.take(tile, gradient=gradient)
        assert copy is not None
        assert (copy.gradient is not None) == gradient
        copy_tile(tile, copy)
        pairs = zip(regions(tile, gradient=gradient), regions(copy, gradient=gradient), strict=True)
        for one, other in pairs:
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
            assert other.data_ptr() % PAGE_BYTES == 0
            assert one.data_ptr() != other.data_ptr()


@given(
    num_pages=st.integers(0, 40),
    acts=st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=30),
)
def test_copies_never_overlap_and_never_leave_the_pool(
    num_pages: int, acts: list[tuple[bool, int]]
) -> None:
    store = STORE
    pool = BouncePool(num_pages * PAGE_BYTES + 5)
    assert pool.num_bytes == num_pages * PAGE_BYTES
    held: list[tuple[int, int, LayerTile]] = []
    for takes, layer in acts:
        if takes:
            copy = pool.take(store.tiles[layer], gradient=False)
            need = tile_bytes(store, layer)
            if copy is None:
                assert pool.taken_bytes + need > pool.num_bytes or held
            else:
                start = copy.linked.data_ptr()
                held.append((start, start + need, copy))
        elif held:
            pool.give_back(held.pop(layer % len(held))[2])
        ranges = sorted((start, end) for start, end, _ in held)
        ends = [0, *(end for _, end in ranges)]
        assert all(start >= end for (start, _), end in zip(ranges, ends, strict=False))
        assert pool.taken_bytes == sum(end - start for start, end in ranges)
        if held:
            base = cast("torch.Tensor", pool._memory).data_ptr()
            assert ranges[0][0] >= base
            assert ranges[-1][1] <= base + pool.num_bytes
    pool.clear()
    assert pool.taken_bytes == 0


STORE = make_store()
