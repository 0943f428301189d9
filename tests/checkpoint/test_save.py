"""A save is one whole checkpoint of one step, or nothing at all and an error that says why."""

import errno
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from megatrain_cli.checkpoint import layer_writer
from megatrain_cli.checkpoint.folder import open_checkpoint
from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.checkpoint.resolve import resolve
from megatrain_cli.checkpoint.save import Retention, Snapshot
from megatrain_cli.checkpoint.verify import check_part
from megatrain_cli.checkpoint.write import FileWriter
from megatrain_cli.errors import InternalError, MixedStateError, NumericsError, StorageError
from megatrain_cli.plan.tiles import TileFormat
from tests.checkpoint.tiles import (
    FORMATS,
    ORDER,
    facts_of,
    fill_gradients,
    make_store,
    manifest_of,
    payloads,
    save,
    saver_of,
    snapshot_of,
)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.exists() else []  # noqa: PTH208  hidden files too


class Disk(FileSystem):
    """Fails, waits or acts at some of its operations."""

    def __init__(self, **before: Callable[[Any], None]) -> None:
        self._before = before
        self.names: dict[int, str] = {}

    def create(self, path: Path, direct: bool) -> int:
        self._do("create", path.name)
        fd = super().create(path, direct)
        self.names[fd] = path.name
        return fd

    def write(self, fd: int, buffer: memoryview, offset: int) -> int:
        self._do("write", self.names[fd])
        return super().write(fd, buffer, offset)

    def sync(self, fd: int) -> None:
        self._do("sync", self.names[fd])
        super().sync(fd)

    def close(self, fd: int) -> None:
        super().close(fd)
        self._do("close", self.names.get(fd, "a folder"))

    def sync_folder(self, path: Path) -> None:
        self._do("sync_folder", path.name)
        super().sync_folder(path)

    def _do(self, operation: str, name: str) -> None:
        if operation in self._before:
            self._before[operation](name)


def fails(code: int, name: str, times: int = 1) -> Callable[[str], None]:
    left = [times]

    def fail(at: str) -> None:
        if name in at and left[0]:
            left[0] -= 1
            raise OSError(code, os.strerror(code))

    return fail


@contextmanager
def stopped_at(name: str) -> Iterator[tuple[Disk, threading.Event, threading.Event]]:
    """A disk that waits when it is to write a file; the events: it waits, and it may go on."""
    waits, go = threading.Event(), threading.Event()

    def wait(at: str) -> None:
        if name in at:
            waits.set()
            assert go.wait(20)

    try:
        yield Disk(write=wait), waits, go
    finally:
        go.set()


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_a_checkpoint_is_whole_and_safetensors_reads_each_tensor(
    fmt: TileFormat, tmp_path: Path
) -> None:
    store = make_store(fmt)
    folder = save(store, tmp_path, 0)
    assert folder.name == "step-00000000"
    with open_checkpoint(folder, FileSystem()) as checkpoint:
        for part in checkpoint.manifest.parts:
            check_part(checkpoint, part)
        assert checkpoint.read_aux("training/config.yaml") == b"seed: 1\n"
    for tile in store.tiles:
        with safe_open(folder / f"model-{tile.layout.layer.name}.safetensors", "pt") as file:
            assert file.metadata()["megatrain.shard"] == tile.layout.layer.name
            for name in tile.layout.by_name:
                assert torch.equal(file.get_tensor(name), tile.view(name))


def test_the_report_tells_what_was_written_and_the_hint_names_it(tmp_path: Path) -> None:
    store = make_store()
    saver = saver_of(store, tmp_path)
    assert not saver.in_flight
    assert saver.begin(snapshot_of(store, 0))
    (report,) = saver.wait()
    manifest = manifest_of(report.folder)
    assert (report.step, report.id, report.num_bytes) == (0, manifest.id, manifest.bytes_total)
    files = [report.folder / name for name in manifest.files]
    assert report.num_bytes == sum(path.stat().st_size for path in files)
    assert (report.stall_seconds, report.removed, report.notes) == (0, (), ())
    assert report.mode in ("direct", "bounce", "buffered")
    found = resolve(tmp_path, FileSystem())
    found.checkpoint.close()
    assert (found.checkpoint.folder, found.notes) == (report.folder, ())
    assert saver.poll() == []
    saver.close()


def test_several_threads_write_the_same_bytes(tmp_path: Path) -> None:
    store = make_store()
    alone = payloads(save(store, tmp_path / "one", 0))
    saver = saver_of(store, tmp_path / "many", threads=3)
    saver.begin(snapshot_of(store, 0))
    (report,) = saver.wait()
    assert payloads(report.folder) == alone


def test_one_save_at_a_time_and_the_next_when_it_is_reported(tmp_path: Path) -> None:
    store = make_store()
    with stopped_at("model-embed") as (disk, waits, go):
        saver = saver_of(store, tmp_path, disk)
        assert saver.begin(snapshot_of(store, 0))
        assert waits.wait(20)
        assert saver.in_flight
        assert not saver.begin(snapshot_of(store, 0))
        assert saver.poll() == []
        go.set()
        assert len(saver.wait()) == 1
    store.clock.set_steps((1,) * 4)
    assert saver.begin(snapshot_of(store, 1))
    assert [report.step for report in saver.wait()] == [1]
    assert names(tmp_path / "checkpoints") == ["latest.json", "step-00000000", "step-00000001"]


def test_old_checkpoints_are_retired_once_the_new_one_is_there(tmp_path: Path) -> None:
    store = make_store()
    saver = saver_of(store, tmp_path, retention=Retention(tmp_path, keep_last=1, keep_every=2))
    removed: list[Path] = []
    for step in range(5):
        store.clock.set_steps((step,) * 4)
        saver.begin(snapshot_of(store, step))
        removed += saver.wait()[0].removed
    assert [path.name for path in removed] == ["step-00000001", "step-00000003"]
    kept = ["step-00000000", "step-00000002", "step-00000004"]
    assert names(tmp_path / "checkpoints") == ["latest.json", *kept]


def test_a_hint_that_cannot_be_written_is_a_note_and_the_checkpoint_stands(tmp_path: Path) -> None:
    store = make_store()
    saver = saver_of(store, tmp_path, Disk(create=fails(errno.EIO, "latest", times=9)))
    saver.begin(snapshot_of(store, 0))
    (report,) = saver.wait()
    assert "is saved, but" in report.notes[0]
    assert "latest.json" in report.notes[0]
    assert names(tmp_path / "checkpoints") == ["step-00000000"]


@pytest.mark.parametrize("operation", ["write", "sync", "close", "sync_folder"])
def test_a_disk_that_fails_once_is_written_to_anew_and_never_synced_again(
    operation: str, tmp_path: Path
) -> None:
    where = {"sync_folder": "step-"}.get(operation, "optim-layer-00001")
    store = make_store()
    wanted = payloads(save(store, tmp_path / "good", 0))
    saver = saver_of(store, tmp_path, Disk(**{operation: fails(errno.EIO, where)}), threads=2)
    saver.begin(snapshot_of(store, 0))
    (report,) = saver.wait()
    assert payloads(report.folder) == wanted
    assert "written once more" in report.notes[0]
    assert names(tmp_path / "checkpoints") == ["latest.json", "step-00000000"]


@pytest.mark.parametrize(("code", "times"), [(errno.EIO, 2), (errno.ENOSPC, 1)])
def test_a_disk_that_goes_on_failing_is_reported_within_a_poll_and_leaves_nothing(
    code: int, times: int, tmp_path: Path
) -> None:
    before = save(make_store(), tmp_path, 0)
    store = make_store()
    store.clock.set_steps((1,) * 4)
    saver = saver_of(store, tmp_path, Disk(write=fails(code, "optim-head", times)))
    saver.begin(snapshot_of(store, 1))
    with pytest.raises(StorageError, match="step-00000001 could not be written"):
        saver.wait()
    assert saver.poll() == []
    assert names(tmp_path / "checkpoints") == ["latest.json", before.name]
    store.clock.begin_update(0)  # nobody is kept waiting
    store.clock.end_update(0, 2)


def test_after_an_update_a_failed_save_is_not_tried_again(tmp_path: Path) -> None:
    store = make_store()
    with stopped_at("optim-layer-00001") as (disk, waits, go):
        disk._before["close"] = fails(errno.EIO, "optim-layer-00001")
        saver = saver_of(store, tmp_path, disk)
        saver.begin(snapshot_of(store, 0))
        assert waits.wait(20)  # the last layer in order: the others are saved
        store.clock.begin_update(ORDER[0])
        store.clock.end_update(ORDER[0], 1)
        go.set()
        with pytest.raises(StorageError, match="Input/output error"):
            saver.wait()
    assert names(tmp_path / "checkpoints") == []


def test_a_sync_of_the_folder_that_fails_after_an_update_says_so(tmp_path: Path) -> None:
    store = make_store()

    def update_and_fail(name: str) -> None:
        if name == "training":
            store.clock.begin_update(0)
            store.clock.end_update(0, 1)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    saver = saver_of(store, tmp_path, Disk(sync_folder=update_and_fail))
    saver.begin(snapshot_of(store, 0))
    with pytest.raises(StorageError, match="layers have been updated since"):
        saver.wait()
    assert names(tmp_path / "checkpoints") == []


def test_any_failure_of_the_saver_reaches_who_polls_and_the_next_save_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise ZeroDivisionError("a bug")

    store = make_store()
    saver = saver_of(store, tmp_path, threads=2)
    with monkeypatch.context() as patch:
        patch.setattr(layer_writer, "tile_parts", broken)
        saver.begin(snapshot_of(store, 0))
        with pytest.raises(ZeroDivisionError, match="a bug"):
            saver.wait()
    assert names(tmp_path / "checkpoints") == []
    saver.begin(snapshot_of(store, 0))
    assert len(saver.wait()) == 1


def test_reports_come_before_a_failure_that_came_after_them(tmp_path: Path) -> None:
    saver = saver_of(make_store(), tmp_path)
    report: Any = object()
    saver._box.extend([report, InternalError("later")])
    assert saver.poll() == [report]
    with pytest.raises(InternalError, match="later"):
        saver.poll()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_never_published(
    value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_writer, "_LOOK", 10)
    before = save(make_store(), tmp_path, 0)
    store = make_store()
    store.clock.set_steps((1,) * 4)
    store.tiles[-1].view("head.out")[127, 2] = value
    saver = saver_of(store, tmp_path)
    saver.begin(snapshot_of(store, 1))
    with pytest.raises(NumericsError, match=r"head\.out has values that are not finite"):
        saver.wait()
    assert names(tmp_path / "checkpoints") == ["latest.json", before.name]


@pytest.mark.parametrize("at", [(1, 2, 2, 2), (2, 2, 3, 2)], ids=["behind", "ahead"])
def test_layers_of_different_steps_are_not_saved(at: tuple[int, ...], tmp_path: Path) -> None:
    store = make_store()
    store.clock.set_steps(at)
    store.clock.settle()
    saver = saver_of(store, tmp_path)
    with pytest.raises(MixedStateError, match="belong to no one step"):
        saver.begin(snapshot_of(store, 2))
    assert saver.wait() == []
    assert names(tmp_path / "checkpoints") == []


def test_a_tile_that_an_update_left_half_done_is_not_saved(tmp_path: Path) -> None:
    store = make_store()
    store.clock.begin_update(2)
    store.clock.fail_update(2)
    with pytest.raises(MixedStateError, match="in the middle of an update"):
        saver_of(store, tmp_path).begin(snapshot_of(store, 0))


def test_an_update_that_fails_while_a_save_waits_for_it_ends_the_save(tmp_path: Path) -> None:
    store = make_store()
    store.clock.begin_update(2)
    saver = saver_of(store, tmp_path)
    saver.begin(snapshot_of(store, 1))
    store.clock.fail_update(2)
    store.clock.settle()
    with pytest.raises(MixedStateError):
        saver.wait()
    assert names(tmp_path / "checkpoints") == []


@pytest.mark.parametrize("name", ["model-layer-00000", "optim-layer-00001", "config.yaml"])
def test_a_save_that_is_abandoned_stops_at_a_chunk_and_leaves_nothing(
    name: str, tmp_path: Path
) -> None:
    store = make_store()
    with stopped_at(name) as (disk, waits, go), ThreadPoolExecutor(1) as pool:
        saver = saver_of(store, tmp_path, disk)
        saver.begin(snapshot_of(store, 0))
        assert waits.wait(20)
        cancelled = threading.Event()
        cancel = store.clock.cancel

        def tell(hold: Any) -> None:
            cancel(hold)
            cancelled.set()

        store.clock.cancel = tell  # type: ignore[method-assign]
        abandoned = pool.submit(saver.abandon)
        assert cancelled.wait(20)
        go.set()
        abandoned.result(20)
    assert saver.poll() == []
    assert not saver.in_flight
    assert names(tmp_path / "checkpoints") == []
    store.clock.begin_update(0)


def test_a_save_that_waits_for_an_update_can_be_abandoned(tmp_path: Path) -> None:
    store = make_store()
    saver = saver_of(store, tmp_path, threads=2)
    saver.begin(snapshot_of(store, 1))
    saver.abandon()
    saver.close()
    assert saver.poll() == []
    assert names(tmp_path / "checkpoints") == []


def test_a_pending_update_that_all_layers_have_had_is_not_pending(tmp_path: Path) -> None:
    store = make_store()
    fill_gradients(store, 3)
    store.clock.set_steps((3, 3, 3, 3))
    manifest = manifest_of(save(store, tmp_path, 2, pending=3))
    assert (manifest.step, manifest.pending) == (3, None)
    assert {len(shard.parts) for shard in manifest.shards} == {2}


@pytest.mark.parametrize(("steps", "step"), [((2, 2, 2, 2), 2), ((2, 3, 3, 2), 3)])
def test_a_pending_update_is_saved_with_the_gradients_that_it_still_needs(
    steps: tuple[int, ...], step: int, tmp_path: Path
) -> None:
    store = make_store()
    fill_gradients(store, 3)
    store.clock.set_steps(steps)
    folder = save(store, tmp_path, 2, pending=3)
    manifest = manifest_of(folder)
    assert folder.name == f"step-{step:08d}"
    assert (manifest.step, manifest.format.required_features) == (step, ("grads",))
    assert tuple(shard.layer_step for shard in manifest.shards) == steps
    assert [shard.has_grads for shard in manifest.shards] == [at == 2 for at in steps]
    with safe_open(folder / "training/grads-embed.safetensors", "pt") as file:
        gradient = store.tiles[0].gradient
        assert gradient is not None
        assert torch.equal(file.get_tensor("grad.embed.weight").view(-1), gradient[: 41 * 33])


def test_facts_and_files_that_do_not_fit_are_a_bug(tmp_path: Path) -> None:
    store = make_store()
    saver = saver_of(store, tmp_path, writer=FileWriter(FileSystem(), direct="off"))
    saver.begin(Snapshot(facts_of(store, 0), {}))
    with pytest.raises(ValueError, match=r"no config\.json"):
        saver.wait()
    assert names(tmp_path / "checkpoints") == []
