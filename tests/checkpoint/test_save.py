"""A save is one whole checkpoint of one step, or nothing at all and an error that says why."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from megatrain_cli.checkpoint.folder import open_checkpoint
from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.checkpoint.resolve import resolve
from megatrain_cli.checkpoint.save import Retention, Snapshot
from megatrain_cli.checkpoint.verify import check_part
from megatrain_cli.checkpoint.write import FileWriter
from megatrain_cli.errors import MixedStateError
from megatrain_cli.plan.tiles import TileFormat
from tests.checkpoint.tiles import (
    FORMATS,
    facts_of,
    fill_gradients,
    make_store,
    manifest_of,
    payloads,
    save,
    saver_of,
    snapshot_of,
)
from tests.checkpoint.trouble import names, stopped_at


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
    files = [report.folder / one.file for one in manifest.files]
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
        assert waits.wait(60)
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
