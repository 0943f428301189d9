"""What is loaded is what was saved, bit for bit; and nothing is used before it was checked."""

import errno
import os
import threading
from pathlib import Path

import pytest
import torch

from megatrain_cli.checkpoint.folder import open_checkpoint
from megatrain_cli.checkpoint.fsio import BLOCK
from megatrain_cli.checkpoint.load import LazyLoader
from megatrain_cli.errors import DeviceError, Stopped
from megatrain_cli.model.layout import LayerLayout
from megatrain_cli.plan.tiles import TileFormat
from megatrain_cli.store.clock import TileClock
from megatrain_cli.store.master import MasterStore
from tests.checkpoint.loading import ReadDisk, load, loading
from tests.checkpoint.tiles import (
    FORMATS,
    LAYOUTS,
    ORDER,
    SPLIT,
    bits,
    fill_gradients,
    layer,
    make_store,
    manifest_of,
    payloads,
    save,
)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_loaded_tiles_and_those_saved_again_are_equal_to_the_last_bit(
    fmt: TileFormat, direct: bool, tmp_path: Path
) -> None:
    store = make_store(fmt)
    store.clock.set_steps((5,) * 4)
    folder = save(store, tmp_path / "one", 5)
    fresh = MasterStore(LAYOUTS, fmt)
    report = load(folder, fresh, direct=direct)
    assert bits(fresh) == bits(store)  # gaps too
    assert fresh.clock.steps == (5, 5, 5, 5)
    assert report.num_bytes == sum(part.bytes for part in manifest_of(folder).parts)
    assert report.seconds > 0
    assert payloads(save(fresh, tmp_path / "two", 5)) == payloads(folder)


def test_aligned_pieces_are_read_past_the_page_cache_and_chunks_keep_their_size(
    tmp_path: Path,
) -> None:
    layouts = (layer("embed", weight=(64, 128)), layer("head", norm=(2048,), out=(61, 128)))
    store = make_store(layouts=layouts)
    folder = save(store, tmp_path, 0, order=(0, 1))
    fs = ReadDisk()
    fresh = MasterStore(layouts, SPLIT)
    with open_checkpoint(folder, fs) as checkpoint:
        fs.reads.clear()
        loader = LazyLoader(
            checkpoint, fresh, fs=fs, update_order=(0, 1), threads=2, chunk_bytes=2 * BLOCK
        )
        loader.start()
        loader.wait()
    assert bits(fresh) == bits(store)
    assert max(size for _, _, size, _ in fs.reads) <= 2 * BLOCK
    straight = [read for read in fs.reads if read[3]]
    assert all(offset % BLOCK == 0 == size % BLOCK for _, offset, size, _ in straight)
    if straight:  # not every file system can
        embed = sum(size for name, _, size, _ in straight if name.endswith("embed.safetensors"))
        assert embed == (2 + 2 + 4 + 4) * 64 * 128


def test_a_pending_gradient_is_loaded_and_its_layer_stands_one_step_before(tmp_path: Path) -> None:
    store = make_store()
    fill_gradients(store, 3)
    store.clock.set_steps((2, 3, 3, 2))
    folder = save(store, tmp_path / "one", 2, pending=3)
    fresh = MasterStore(LAYOUTS, SPLIT)
    load(folder, fresh)
    assert fresh.clock.steps == (2, 3, 3, 2)
    for one, other, waits in zip(fresh.tiles, store.tiles, (True, False, False, True), strict=True):
        assert one.gradient is not None
        assert other.gradient is not None
        wanted = other.gradient if waits else torch.zeros_like(other.gradient)
        assert torch.equal(one.gradient, wanted)
    assert payloads(save(fresh, tmp_path / "two", 2, pending=3)) == payloads(folder)


def test_reads_that_end_early_or_are_refused_past_the_cache_change_nothing(tmp_path: Path) -> None:
    layouts = (*LAYOUTS[:3], layer("head", weight=(64, 128)))  # the last is aligned everywhere
    store = make_store(layouts=layouts)
    folder = save(store, tmp_path, 0)
    refused: list[int] = []

    def trouble(name: str, offset: int, buffer: memoryview) -> int | None:
        if fs.reads[-1][3] and offset % (2 * BLOCK):
            refused.append(offset)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return 100 if buffer.nbytes == BLOCK else None

    fs = ReadDisk(trouble)
    fresh = MasterStore(layouts, SPLIT)
    load(folder, fresh, fs)
    assert bits(fresh) == bits(store)
    assert refused or not any(direct for *_, direct in fs.reads)


def test_layers_are_announced_in_the_order_of_use_within_the_promised_bytes(tmp_path: Path) -> None:
    layouts: tuple[LayerLayout, ...] = tuple(
        layer(name, weight=(100, 128)) for name in ("embed", "layer-00000", "layer-00001", "head")
    )
    folder = save(make_store(layouts=layouts), tmp_path, 0)
    parts = {part.file: part.bytes for part in manifest_of(folder).parts}
    seen: list[tuple[str, int, int]] = []

    class Noting(TileClock):
        def weights_arrived(self, layer: int) -> None:
            seen.append(("weights", layer, loader.num_bytes))
            super().weights_arrived(layer)

        def state_arrived(self, layer: int, step: int) -> None:
            seen.append(("state", layer, loader.num_bytes))
            super().state_arrived(layer, step)

    for threads, window in ((1, 1), (4, 6)):
        seen.clear()
        store = MasterStore(layouts, SPLIT)
        store.clock = Noting([layout.layer.name for layout in layouts])
        with loading(folder, store, threads=threads, window=window) as loader:
            loader.start()
            loader.wait()
        bound = parts["model-embed.safetensors"] + parts["model-layer-00000.safetensors"]
        found = {(what, layer): num_bytes for what, layer, num_bytes in seen}
        assert set(found) == {(what, layer) for what in ("weights", "state") for layer in range(4)}
        if threads == 1:  # others may read on while the thread that announces is held up
            assert found["weights", 1] <= bound + window * BLOCK
            assert [layer for what, layer, _ in seen if what == "weights"] == [0, 1, 2, 3]
            assert [layer for what, layer, _ in seen if what == "state"] == list(ORDER)


@pytest.mark.parametrize("threads", [1, 4])
def test_the_first_layers_are_usable_while_the_disk_holds_back_the_next(
    threads: int, tmp_path: Path
) -> None:
    store = make_store()
    folder = save(store, tmp_path, 0)
    held, go = threading.Event(), threading.Event()

    def wait(name: str, offset: int, buffer: memoryview) -> None:
        if "layer-00001" in name and threading.current_thread().name.startswith("load"):
            held.set()
            assert go.wait(60)

    fresh = MasterStore(LAYOUTS, SPLIT)
    fs = ReadDisk(wait)
    with loading(folder, fresh, fs, threads=threads) as loader:
        try:
            loader.start()
            assert held.wait(60)
            for index in (0, 1):
                fresh.clock.wait_for_weights(index)
                assert torch.equal(fresh.tiles[index].weights, store.tiles[index].weights)
            assert not fresh.tiles[2].weights.any()
            assert not fresh.clock._weights_there[2]
            assert not any(fresh.clock._state_there)
        finally:
            go.set()
        loader.wait()
    assert bits(fresh) == bits(store)
    assert fresh.clock.loaded


def test_each_layer_is_prepared_once_before_its_first_byte(tmp_path: Path) -> None:
    folder = save(make_store(), tmp_path, 0)
    store = MasterStore(LAYOUTS, SPLIT)
    prepared: list[int] = []

    def prepare(index: int) -> None:
        assert not store.tiles[index].weights.any()
        prepared.append(index)

    load(folder, store, threads=4, before_layer=prepare)
    assert sorted(prepared) == [0, 1, 2, 3]


def test_a_layer_that_cannot_be_prepared_ends_the_loading(tmp_path: Path) -> None:
    folder = save(make_store(), tmp_path, 0)
    store = MasterStore(LAYOUTS, SPLIT)

    def refuse(index: int) -> None:
        raise RuntimeError("no pages to lock")

    with pytest.raises(RuntimeError, match="no pages"):
        load(folder, store, before_layer=refuse)
    with pytest.raises(RuntimeError, match="no pages"):
        store.clock.wait_for_weights(0)


def test_after_a_refusal_no_other_layer_is_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was page-locked is given back by then, and a late range would stay locked."""
    store = make_store()
    folder = save(store, tmp_path, 0)
    prepared: list[int] = []
    again = threading.Event()

    def refuse(layer: int) -> None:
        prepared.append(layer)
        if len(prepared) > 1:
            again.set()
            return
        raise DeviceError("no more")

    fail = LazyLoader._fail

    def fail_late(self: LazyLoader, error: BaseException) -> None:
        again.wait(0.2)  # time for another thread
        fail(self, error)

    monkeypatch.setattr(LazyLoader, "_fail", fail_late)
    with pytest.raises(DeviceError, match="no more"):
        load(folder, store, threads=4, before_layer=refuse)
    assert len(prepared) == 1


def test_loading_can_be_stopped_and_nobody_waits_for_ever(tmp_path: Path) -> None:
    folder = save(make_store(), tmp_path, 0)
    for started in (False, True):
        store = MasterStore(LAYOUTS, SPLIT)
        with loading(folder, store, window=1) as loader:
            if started:
                loader.start()
            loader.close()
        if not store.clock.loaded:
            with pytest.raises(Stopped, match="before it was complete"):
                store.clock.wait_for_state(3)


def test_a_checkpoint_may_be_retired_once_it_is_open(tmp_path: Path) -> None:
    store = make_store()
    folder = save(store, tmp_path, 0)
    fresh = MasterStore(LAYOUTS, SPLIT)
    with loading(folder, fresh) as loader:
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        folder.rmdir()
        loader.start()
        loader.wait()
    assert bits(fresh) == bits(store)
