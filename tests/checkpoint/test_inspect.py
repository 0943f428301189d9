"""Inspection: a good checkpoint is good, and no fault of any file is missed."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.checkpoint.headers import INDEX_NAME
from megatrain_cli.checkpoint.inspect import Inspection, inspect_checkpoint
from megatrain_cli.checkpoint.manifest import Manifest
from megatrain_cli.errors import CorruptError
from tests.checkpoint.made import make_checkpoint

WEIGHTS = "model-layer-00000.safetensors"
OTHER = "model-layer-00001.safetensors"
OPTIM = "training/optim-layer-00000.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "step-00000003"
    make_checkpoint(found, aux={"tokenizer.json": b"{}", "training/plan.json": b"[]"})
    return found


def look(folder: Path, *, full: bool = False) -> Inspection:
    return inspect_checkpoint(folder, FileSystem(), full=full, threads=2)


def flip(path: Path, offset: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        old = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([old ^ (1 << bit)]))


def all_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(
    ("master", "weights", "pending"),
    [
        ("fp32_split", "BF16", 0),
        ("fp32", "BF16", 0),
        ("bf16", "BF16", 0),
        ("fp32", "F32", 0),
        ("fp32_split", "BF16", 2),
        ("bf16", "BF16", 4),
    ],
)
def test_a_good_checkpoint_is_good(
    tmp_path: Path, master: str, weights: str, pending: int, full: bool
) -> None:
    make_checkpoint(tmp_path / "x", master=master, weights=weights, pending=pending)
    found = look(tmp_path / "x", full=full)
    assert (found.problems, found.notes, found.exit_code) == ((), (), 0)
    assert found.status == "good"


def test_a_flipped_bit_of_any_file_is_found_by_reading_every_byte(folder: Path) -> None:
    seen = 0
    for path in all_files(folder):
        size = path.stat().st_size
        places = {*range(0, size, max(1, size // 12)), 7, 8, size - 1, 4095, 4096}
        for number, offset in enumerate(sorted(place for place in places if 0 <= place < size)):
            flip(path, offset, number % 8)
            found = look(folder, full=True)
            assert found.exit_code == 3, (path, offset)
            assert any(path.name in str(problem) for problem in found.problems), (path, offset)
            flip(path, offset, number % 8)
            seen += 1
    assert seen > 150
    assert look(folder, full=True).exit_code == 0


def test_every_missing_cut_or_longer_file_is_found_at_once(folder: Path) -> None:
    for path in all_files(folder):
        raw = path.read_bytes()
        path.unlink()
        # Without a manifest it is no checkpoint; anything else that is missing is damage.
        assert look(folder).exit_code == (5 if path.name == "manifest.json" else 3)
        for changed in (raw[:-1], raw + b"\0", b"", raw[: len(raw) // 2]):
            path.write_bytes(changed)
            assert look(folder).exit_code == 3, (path, len(changed))
        path.write_bytes(raw)
    assert look(folder).exit_code == 0


def test_every_byte_of_a_headers_text_counts_without_a_hash(folder: Path) -> None:
    for name in (WEIGHTS, OPTIM):
        raw = (folder / name).read_bytes()
        text_end = raw.rindex(b"}", 0, raw.index(b"   ")) + 1
        text = raw[8:text_end]
        metadata = text.index(b'"__metadata__"') + 8, text.index(b"}") + 1 + 8
        for offset in range(text_end):
            if not metadata[0] <= offset < metadata[1]:  # free text: shown, never trusted
                flip(folder / name, offset)
                assert look(folder).exit_code == 3, (name, offset)
                flip(folder / name, offset)


def swap(one: Path, other: Path) -> None:
    raw = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(raw)


def test_swapped_layers_are_found_by_their_headers(folder: Path) -> None:
    swap(folder / WEIGHTS, folder / OTHER)
    found = look(folder)
    assert found.exit_code == 3
    assert len(found.problems) == 2
    assert "The file says it is shard layer-00001" in str(found.problems[0])


def test_a_shard_of_another_step_is_found_by_its_hash_and_says_its_step(
    folder: Path, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path / "old", step=2)
    shutil.copyfile(tmp_path / "old" / OPTIM, folder / OPTIM)
    assert look(folder).exit_code == 0  # all that a quick look can know
    found = look(folder, full=True)
    assert [type(problem) for problem in found.problems] == [CorruptError]
    assert "step 2" in str(found.problems[0])


def test_several_faults_are_all_told(folder: Path) -> None:
    for name in (WEIGHTS, OTHER, OPTIM):
        flip(folder / name, 5000 if name == OPTIM else 4096)
    assert len(look(folder, full=True).problems) == 3


def change_manifest(folder: Path, change: Callable[[dict[str, object]], None]) -> None:
    """Change a manifest and give it a right hash: what another version would have written."""
    import hashlib

    value = json.loads((folder / "manifest.json").read_bytes())
    del value["manifest_sha256"]
    change(value)
    text = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    value["manifest_sha256"] = hashlib.sha256(text).hexdigest()
    text = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    (folder / "manifest.json").write_bytes(text)


def test_a_newer_major_version_is_incompatible(folder: Path) -> None:
    change_manifest(folder, lambda value: value["format"].update(major=2))  # type: ignore[attr-defined]
    found = look(folder)
    assert found.exit_code == 4
    assert "2" in str(found.problems[0])


def test_a_newer_minor_version_and_unknown_keys_are_read(folder: Path) -> None:
    def change(value: dict[str, object]) -> None:
        value["format"].update(minor=7)  # type: ignore[attr-defined]
        value["some_new_key"] = [1]

    change_manifest(folder, change)
    assert look(folder).exit_code == 0


def test_dtypes_that_the_manifest_does_not_announce_are_incompatible(folder: Path) -> None:
    change_manifest(folder, lambda value: value["dtypes"].update(weights="F16"))  # type: ignore[attr-defined]
    found = look(folder)
    assert found.exit_code == 4
    assert "BF16" in str(found.problems[0])


def test_unknown_files_are_noted_and_unknown_shards_refused(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")
    found = look(folder)
    assert found.exit_code == 0
    assert "notes.txt" in found.notes[0]
    (folder / "model-extra.safetensors").write_bytes(b"")
    assert look(folder).exit_code == 3


@pytest.mark.parametrize("kind", ["symlink", "fifo", "folder"])
@pytest.mark.parametrize("name", [WEIGHTS, OPTIM, "config.json", "manifest.json"])
def test_what_is_no_regular_file_is_refused_without_waiting(
    folder: Path, name: str, kind: str, tmp_path: Path
) -> None:
    path = folder / name
    path.rename(tmp_path / "moved")
    if kind == "symlink":
        path.symlink_to(tmp_path / "moved")
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    assert look(folder).exit_code == 3


def test_an_index_that_leads_elsewhere_is_refused(folder: Path) -> None:
    manifest = Manifest.from_bytes((folder / "manifest.json").read_bytes())
    name = manifest.shards[0].weights.tensors[0].name
    for target in ("../secret.safetensors", OTHER):
        index = json.loads((folder / INDEX_NAME).read_bytes())
        index["weight_map"][name] = target
        elsewhere = folder.with_name(f"with-{len(target)}")
        make_checkpoint(elsewhere, aux={INDEX_NAME: json.dumps(index).encode()})
        assert look(elsewhere).exit_code == 3


def test_the_folder_itself_may_be_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    assert look(tmp_path / "link", full=True).exit_code == 0


def test_json_tells_everything_and_is_json(folder: Path) -> None:
    flip(folder / WEIGHTS, 4096)
    values = json.loads(json.dumps(look(folder, full=True).to_json()))
    assert values["status"] == "damaged"
    assert values["exit_code"] == 3
    assert values["manifest"]["step"] == 3
    assert WEIGHTS in values["problems"][0]


def test_the_summary_shows_step_rows_losses_and_equal_layers_as_one_group(folder: Path) -> None:
    found = look(folder)
    facts = dict(found.summary)
    assert facts["step"] == "3 of 20"
    assert facts["rows read"].startswith("12 (epoch 0.12) of 100")
    assert facts["last losses"] == "2.5 2.25"
    assert facts["pending"] == "no"
    assert [group.names for group in found.groups] == [
        ("embed",),
        ("layer-00000", "layer-00001"),
        ("head",),
    ]
    assert found.groups[1].parts[0][:2] == ("weights", ("BF16",))
    assert found.groups[1].parts[1][:2] == ("optim", ("F32", "I16"))


def test_a_pending_update_is_told_with_the_shards_that_need_it(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "x", pending=2, parent="sha256:" + "a" * 64)
    facts = dict(look(tmp_path / "x").summary)
    assert facts["pending"] == "the update of step 3 in 2 of 4 shards; resume finishes it"
    assert facts["parent"] == "sha256:" + "a" * 64


def test_a_number_format_that_nobody_trains_is_incompatible(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "x", weights="F64")
    found = inspect_checkpoint(tmp_path / "x", FileSystem(), numerics=True)
    assert found.exit_code == 4
    assert "is F64, and such a tensor is kept as nothing known" in str(found.problems[0])


class Failing(FileSystem):
    """A disk that cannot read one place."""

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        name = os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115  a descriptor, not a path
        if name.endswith(OPTIM) and offset > 4096:
            raise OSError(errno.EIO, "Input/output error")
        return super().read(fd, buffer, offset)


@pytest.mark.parametrize("options", [{"full": True}, {"numerics": True}])
def test_what_the_disk_cannot_read_is_damage_with_file_and_place(
    folder: Path, options: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatrain_cli.checkpoint.verify._CHUNK", 4096 + 64)
    found = inspect_checkpoint(folder, Failing(), threads=2, **options)  # type: ignore[arg-type]
    assert found.exit_code == 3
    assert f"{folder / OPTIM}: reading" in str(found.problems[0])


def test_allowed_changes_of_the_config_are_told(tmp_path: Path) -> None:
    rate = {"key": "optimizer.learning_rate", "old": (0.5).hex(), "new": (0.25).hex(), "step": 2}
    betas = {"key": "optimizer.betas", "old": None, "new": [(0.5).hex(), "0x"], "step": 3}
    make_checkpoint(tmp_path / "x", changes=(rate, betas))
    assert dict(look(tmp_path / "x").summary)["changed"] == (
        "optimizer.learning_rate 0.5 -> 0.25 at step 2; optimizer.betas null -> [0.5, 0x] at step 3"
    )
