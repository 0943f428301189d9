"""A part's bytes against the manifest: whatever was changed, swapped or lost is found and named."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatrain_cli.checkpoint.folder import open_checkpoint
from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.checkpoint.headers import make_padded_header
from megatrain_cli.checkpoint.manifest import Manifest, Part
from megatrain_cli.checkpoint.verify import check_header, check_part
from megatrain_cli.errors import CorruptError
from tests.checkpoint.made import make_checkpoint, random_layers

FIRST = "model-layer-00000.safetensors"
SECOND = "model-layer-00001.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path / "step-00000003", random_layers(), pending=1)
    return tmp_path / "step-00000003"


def part_of(manifest: Manifest, file: str) -> Part:
    return next(part for part in manifest.parts if part.file == file)


def check(folder: Path, file: str, on_bytes: Callable[[int], None] | None = None) -> None:
    with open_checkpoint(folder, FileSystem()) as checkpoint:
        check_part(checkpoint, part_of(checkpoint.manifest, file), on_bytes)


def test_whole_parts_pass_and_every_byte_is_counted(folder: Path) -> None:
    with open_checkpoint(folder, FileSystem()) as checkpoint:
        for part in checkpoint.manifest.parts:
            counted: list[int] = []
            header = check_part(checkpoint, part, counted.append)
            assert sum(counted) == part.bytes
            assert header.metadata["megatrain.step"] == "3"
            assert header.tensors == part.tensors


def test_a_part_is_read_in_chunks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain_cli.checkpoint.verify._CHUNK", 1000)
    counted: list[int] = []
    check(folder, FIRST, counted.append)
    size = (folder / FIRST).stat().st_size
    assert counted == [1000] * (size // 1000) + [size % 1000]


@pytest.mark.parametrize("where", ["first", "middle", "last"])
@pytest.mark.parametrize("file", [FIRST, "training/optim-head.safetensors",
                                  "training/grads-head.safetensors"])  # fmt: skip
def test_a_flipped_bit_of_the_payload_is_found(folder: Path, file: str, where: str) -> None:  # F40
    with open_checkpoint(folder, FileSystem()) as checkpoint:
        part = part_of(checkpoint.manifest, file)
    last = part.bytes - 1
    at = {"first": part.data_start, "middle": (part.data_start + last) // 2, "last": last}[where]
    raw = bytearray((folder / file).read_bytes())
    raw[at] ^= 1
    (folder / file).write_bytes(raw)
    with pytest.raises(CorruptError, match=f"{file}: damaged, or .*manifest says {part.xxh3_128}"):
        check(folder, file)


def test_a_zeroed_shard_of_the_right_size_is_found(folder: Path) -> None:  # F10
    size = (folder / FIRST).stat().st_size
    os.truncate(folder / FIRST, 0)
    os.truncate(folder / FIRST, size)
    with pytest.raises(CorruptError, match=f"{FIRST}: damaged header"):
        check(folder, FIRST)


def test_every_flipped_byte_of_a_header_is_found(folder: Path) -> None:  # F41
    raw = (folder / FIRST).read_bytes()
    with open_checkpoint(folder, FileSystem()) as checkpoint:
        part = part_of(checkpoint.manifest, FIRST)
    (folder / "other").write_bytes(raw)
    for at in range(len(raw.rstrip(b" ")[: part.data_start].rstrip(b" ")) + 2):
        flipped = bytearray(raw)
        flipped[at] ^= 1
        (folder / FIRST).write_bytes(flipped)
        with pytest.raises(CorruptError, match=FIRST):
            check(folder, FIRST)


def test_a_transposed_shape_is_found_by_the_header(folder: Path) -> None:  # F41
    raw = (folder / FIRST).read_bytes()
    (folder / FIRST).write_bytes(raw.replace(b"[12,8]", b"[8,12]", 1))
    with pytest.raises(CorruptError, match=r"BF16 \[8, 12\] where the manifest has .* \[12, 8\]"):
        check(folder, FIRST)


def test_shards_of_two_checkpoints_of_equal_shapes_are_told_apart(folder: Path) -> None:  # F42
    later = folder.with_name("step-00000004")
    make_checkpoint(later, random_layers(), step=4)
    for file in (FIRST, "training/optim-layer-00000.safetensors"):
        shutil.copyfile(later / file, folder / file)
        with pytest.raises(CorruptError, match=f"{file}: damaged, or of another.*, step 4"):
            check(folder, file)


def test_files_of_two_layers_swapped_are_told_apart(folder: Path) -> None:  # F43
    (folder / FIRST).rename(folder / "x")
    (folder / SECOND).rename(folder / FIRST)
    (folder / "x").rename(folder / SECOND)
    for file, wrong in ((FIRST, 1), (SECOND, 0)):
        with pytest.raises(CorruptError, match=rf"its header has 'model\.layers\.{wrong}\."):
            check(folder, file)


def test_a_header_of_fewer_tensors_or_another_start_is_told(folder: Path) -> None:
    with open_checkpoint(folder, FileSystem()) as checkpoint:
        part = part_of(checkpoint.manifest, FIRST)
    raw = (folder / FIRST).read_bytes()
    fewer = part.model_copy(update={"tensors": part.tensors[:1]})
    with pytest.raises(CorruptError, match="2 tensors from byte 4096, the manifest 1 from 4096"):
        check_header(fewer, raw, "x")
    with pytest.raises(CorruptError, match="2 tensors from byte 4096, the manifest 2 from 8192"):
        check_header(part.model_copy(update={"data_start": 8192}), raw, "x")


def test_what_a_foreign_file_says_of_itself_cannot_reach_a_terminal(folder: Path) -> None:
    with open_checkpoint(folder, FileSystem()) as checkpoint:
        part = part_of(checkpoint.manifest, FIRST)
    for metadata, said in (({}, False), ({"megatrain.run_id": "\x1b[2J" * 99}, True)):
        head = make_padded_header(part.tensors, metadata)
        raw = head + bytes(part.bytes - len(head))
        (folder / FIRST).write_bytes(raw)
        with pytest.raises(CorruptError) as caught:
            check(folder, FIRST)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 700
        assert ("The file says it is" in str(caught.value)) == said
