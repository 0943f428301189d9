"""A save that fails or is stopped leaves nothing, says why, and keeps nobody waiting."""

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.checkpoint import layer_writer
from megatrain_cli.checkpoint.layer_writer import check_finite
from megatrain_cli.checkpoint.save import Retention
from megatrain_cli.errors import InternalError, NumericsError, StorageError
from megatrain_cli.model.layout import make_layout
from megatrain_cli.model.spec import LayerSpec, ParamSpec
from megatrain_cli.optim.adamw import ALL_FORMATS
from megatrain_cli.plan.tiles import TileFormat
from megatrain_cli.store.master import MasterStore
from tests.checkpoint.tiles import (
    ORDER,
    make_store,
    payloads,
    save,
    saver_of,
    snapshot_of,
)
from tests.checkpoint.trouble import Disk, fails, names, stopped_at

NOT_FINITE = [float("nan"), float("inf"), float("-inf")]


def test_a_hint_that_cannot_be_written_is_a_note_and_the_checkpoint_stands(tmp_path: Path) -> None:
    store = make_store()
    saver = saver_of(store, tmp_path, Disk(create=fails(errno.EIO, "latest", times=9)))
    saver.begin(snapshot_of(store, 0))
    (report,) = saver.wait()
    assert "is saved, but" in report.notes[0]
    assert "latest.json" in report.notes[0]
    assert names(tmp_path / "checkpoints") == ["step-00000000"]


def test_old_checkpoints_are_retired_though_the_hint_cannot_be_written(tmp_path: Path) -> None:
    """A full disk above all: retiring is what makes room."""
    store = make_store()
    disk = Disk(create=fails(errno.ENOSPC, "latest", times=9))
    saver = saver_of(store, tmp_path, disk, retention=Retention(tmp_path, keep_last=1))
    for step in range(3):
        store.clock.set_steps((step,) * 4)
        saver.begin(snapshot_of(store, step))
        (report,) = saver.wait()
        assert "latest.json" in report.notes[0]
    assert names(tmp_path / "checkpoints") == ["step-00000002"]


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
        assert waits.wait(60)  # the last layer in order: the others are saved
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


@pytest.mark.parametrize("value", NOT_FINITE)
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


@given(st.sampled_from(list(ALL_FORMATS)), st.integers(0, 10**6), st.sampled_from(NOT_FINITE))
def test_a_value_that_is_not_finite_is_found_wherever_it_is(
    fmt: TileFormat, where: int, value: float
) -> None:
    """Among the largest finite ones, which are none."""
    layout = make_layout(LayerSpec("one", "", (ParamSpec("weight", (700,)),)))
    store = MasterStore((layout,), fmt)
    [tile] = store.tiles
    most = torch.finfo(tile.weights.dtype).max
    tile.weights[:700] = torch.tensor([most, -most]).repeat(350)
    check_finite(tile, "")
    tile.weights[where % 700] = value
    with pytest.raises(NumericsError, match="weight has values that are not finite"):
        check_finite(tile, "")
    store.close()


@pytest.mark.parametrize("name", ["model-layer-00000", "optim-layer-00001", "config.yaml"])
def test_a_save_that_is_abandoned_stops_at_a_chunk_and_leaves_nothing(
    name: str, tmp_path: Path
) -> None:
    store = make_store()
    with stopped_at(name) as (disk, waits, go), ThreadPoolExecutor(1) as pool:
        saver = saver_of(store, tmp_path, disk)
        saver.begin(snapshot_of(store, 0))
        assert waits.wait(60)
        cancelled = threading.Event()
        cancel = store.clock.cancel

        def tell(hold: Any) -> None:
            cancel(hold)
            cancelled.set()

        store.clock.cancel = tell  # type: ignore[method-assign]
        abandoned = pool.submit(saver.abandon)
        assert cancelled.wait(60)
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
