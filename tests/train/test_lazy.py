"""Whole runs beside a loader and a saver: the same bits as alone, and the loader's own errors."""

import threading
from pathlib import Path

import pytest
import torch

from megatrain_cli.checkpoint.folder import open_checkpoint
from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.checkpoint.load import LazyLoader
from megatrain_cli.checkpoint.model_files import model_files
from megatrain_cli.checkpoint.save import Saver, SaveReport, Snapshot
from megatrain_cli.errors import CorruptError
from megatrain_cli.store.master import MasterStore
from tests.checkpoint.loading import ReadDisk
from tests.checkpoint.tiles import facts_of, manifest_of, payloads
from tests.train.workspace import Started, digest, load_whole, make_workspace, start

BF16 = ["model.dtype=bfloat16", "optimizer.master=fp32_split"]


def take(store: MasterStore, model: Path, step: int) -> Snapshot:
    return Snapshot(facts_of(store, step), model_files(model, store.tiles[0].weights.dtype))


def saver_of(run: Started, folder: Path) -> Saver:
    (folder / "checkpoints").mkdir(parents=True)
    count = len(run.engine.store.tiles)
    order = (*range(count - 2), count - 1, count - 2)
    return Saver(
        run.engine.store, folder / "checkpoints", order, fs=FileSystem(), pool_bytes=1 << 16
    )


def test_saves_beside_a_run_do_not_change_it_and_are_those_of_a_run_that_waits(
    tmp_path: Path,
) -> None:
    config = make_workspace(tmp_path, train={"max_steps": 4})
    ends = []
    saved: list[SaveReport] = []
    for waits in (True, False):
        with start(config, BF16) as run:
            folder = tmp_path / str(waits)
            saver = saver_of(run, folder)
            store = run.engine.store
            saved.clear()
            for record in run.steps():
                if saver.begin(take(store, tmp_path / "model", record.step)) and waits:
                    saved += saver.wait()
            saved += saver.wait()
            assert saved[-1].step == 4 or not waits
            ends.append(digest(store))
    assert ends[0] == ends[1]
    for report in saved:
        alone = tmp_path / "True" / "checkpoints" / report.folder.name
        assert payloads(report.folder) == payloads(alone)
    with start(config, BF16) as run:
        for _ in run.steps():
            pass
        assert digest(run.engine.store) == ends[0]
    params = load_whole(tmp_path / "True" / "checkpoints" / "step-00000004")
    assert all(param.dtype == torch.bfloat16 for param in params.values())


@pytest.fixture
def halfway(tmp_path: Path) -> tuple[Path, Path]:
    """A run's config and its checkpoint before the first step."""
    config = make_workspace(tmp_path)
    with start(config, BF16) as run:
        saver = saver_of(run, tmp_path / "saved")
        saver.begin(take(run.engine.store, tmp_path / "model", 0))
        (report,) = saver.wait()
    return config, report.folder


def wiped(run: Started) -> MasterStore:
    store = run.engine.store
    for tile in store.tiles:
        for flat in (tile.weights, tile.remainder, tile.exp_avg, tile.exp_avg_sq):
            assert flat is not None
            flat.zero_()
    return store


def test_a_run_that_begins_while_its_weights_are_read_ends_as_one_that_has_them(
    halfway: tuple[Path, Path],
) -> None:
    config, folder = halfway
    with start(config, BF16) as run:
        eager = [record.loss for record in run.steps()], digest(run.engine.store)
    with start(config, BF16) as run:
        store = wiped(run)
        wanted = threading.Semaphore(0)
        waits = type(store.clock).wait_for_weights

        def wait(layer: int) -> None:
            wanted.release()  # the engine is here, and one more file may be read
            waits(store.clock, layer)

        def read(name: str, offset: int, buffer: memoryview) -> None:
            if offset == 0 and threading.current_thread().name.startswith("load"):
                assert name.startswith("training") or wanted.acquire(timeout=60)

        store.clock.wait_for_weights = wait  # type: ignore[method-assign]
        fs = ReadDisk(read)
        with open_checkpoint(folder, fs) as checkpoint:
            loader = LazyLoader(
                checkpoint,
                store,
                fs=fs,
                update_order=range(5),
                use_order=(0, 1, 2, 4, 3),  # as `PipelineShape.arrivals` has it
                threads=1,
            )
            loader.start()
            assert ([record.loss for record in run.steps()], digest(store)) == eager
            loader.wait()


@pytest.mark.parametrize("file", ["model-layer-00001", "training/optim-layer-00001"])
def test_a_damaged_layer_stops_the_run_with_the_loaders_own_error_before_it_is_used(
    file: str, halfway: tuple[Path, Path]
) -> None:
    config, folder = halfway
    path = folder / f"{file}.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with start(config, BF16) as run:
        store = wiped(run)
        with open_checkpoint(folder, FileSystem()) as checkpoint:
            loader = LazyLoader(
                checkpoint, store, fs=FileSystem(), update_order=range(len(store.tiles))
            )
            loader.start()
            with pytest.raises(CorruptError, match=file) as found:
                list(run.steps())
            with pytest.raises(CorruptError) as own:
                loader.wait()
            assert found.value is own.value
    index = next(s.index for s in manifest_of(folder).shards if s.name == "layer-00001")
    assert store.clock.steps[index] == 0
