"""An exported folder loads in transformers with the bits of the checkpoint, or is not there."""

import errno
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from megatrain_cli.checkpoint.cast import CastWeight, cast_weights
from megatrain_cli.checkpoint.export import cut_files, export
from megatrain_cli.checkpoint.folder import OpenCheckpoint, open_checkpoint
from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.checkpoint.headers import INDEX_NAME
from megatrain_cli.checkpoint.reread import check_written
from megatrain_cli.errors import (
    CorruptError,
    IncompatibleError,
    StorageError,
)
from tests.checkpoint.exporting import left, refused, run_export, same_bits
from tests.checkpoint.made import F32, make_checkpoint
from tests.checkpoint.made_model import make_model_checkpoint
from tests.train.workspace import load_whole


@pytest.mark.parametrize("max_file_bytes", [5 * 10**9, 3000])
@pytest.mark.parametrize(
    ("kind", "tied"), [("llama", False), ("llama", True), ("qwen3", True), ("gpt2", True)]
)
def test_transformers_loads_the_very_bits_of_the_checkpoint(
    tmp_path: Path, kind: str, tied: bool, max_file_bytes: int
) -> None:
    make_model_checkpoint(tmp_path / "x", kind, tied=tied)
    done = run_export(tmp_path / "x", tmp_path / "out", max_file_bytes=max_file_bytes)
    ours, theirs = load_whole(tmp_path / "out"), load_whole(tmp_path / "x")
    assert ours.keys() == theirs.keys()
    assert all(same_bits(ours[name], theirs[name]) for name in ours)
    assert {param.dtype for param in ours.values()} == {torch.bfloat16}
    assert (len(done.files) == 1) == (max_file_bytes > 3000)
    assert (tmp_path / "out" / INDEX_NAME).exists() == (len(done.files) > 1)


def test_everything_but_training_goes_with_it_and_the_old_card_is_kept(tmp_path: Path) -> None:
    extra = {"LICENSE": b"\xff\r\n", "README.md": b"# base"}
    make_model_checkpoint(tmp_path / "x", extra=extra)
    done = run_export(tmp_path / "x", tmp_path / "new" / "out")
    out = tmp_path / "new" / "out"
    assert (out / "LICENSE").read_bytes() == extra["LICENSE"]
    assert (out / "README-base-model.md").read_bytes() == b"# base"
    assert (out / "README.md").read_text() == "# bfloat16\n"
    assert left(tmp_path / "new") == ["out"]
    copied = ["generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    for name in (*copied, "chat_template.jinja"):
        assert (out / name).read_bytes() == (tmp_path / "x" / name).read_bytes()
    cards = ["LICENSE", "README-base-model.md", "README.md"]
    wanted = [*cards, *copied, "chat_template.jinja", "config.json", "model.safetensors"]
    assert left(out) == sorted(wanted)
    assert done.num_bytes == sum(path.stat().st_size for path in out.iterdir())


def test_a_second_export_keeps_the_card_of_its_own_base(tmp_path: Path) -> None:
    extra = {"README.md": b"mine", "README-base-model.md": b"older"}
    make_checkpoint(tmp_path / "x", aux=extra)
    run_export(tmp_path / "x", tmp_path / "out")
    assert (tmp_path / "out" / "README-base-model.md").read_bytes() == b"mine"


def test_a_pending_update_is_refused_with_what_to_do(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "x", pending=1)
    refused(IncompatibleError, r"in the middle of step 3.*megatrain resume", tmp_path)


def test_a_folder_that_is_there_is_not_touched(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "x")
    (tmp_path / "out").mkdir()
    refused(StorageError, "is there already", tmp_path)
    assert left(tmp_path / "out") == []


@pytest.mark.parametrize(
    ("file", "dtype"),
    [("model-head.safetensors", None), ("training/optim-head.safetensors", "F32")],
)
def test_a_damaged_file_is_found_before_anything_is_written(
    tmp_path: Path, file: str, dtype: str | None
) -> None:
    make_checkpoint(tmp_path / "x")
    raw = bytearray((tmp_path / "x" / file).read_bytes())
    raw[-1] ^= 1
    (tmp_path / "x" / file).write_bytes(raw)
    refused(CorruptError, "xxh3-128", tmp_path, dtype=dtype)


def test_files_that_are_not_read_may_be_damaged(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "x")
    path = tmp_path / "x" / "training" / "optim-head.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    run_export(tmp_path / "x", tmp_path / "out")


class Full(FileSystem):
    """A disk with little room."""

    def free_bytes(self, path: Path) -> int:
        return 1000


def test_a_full_disk_is_refused_first_with_both_numbers(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "x")
    refused(StorageError, r"needs 16\.\d MiB and 1000 B is free", tmp_path, fs=Full())


class Breaks(FileSystem):
    """Fails at the n-th operation that changes the disk."""

    def __init__(self, at: int) -> None:
        self.left = at

    def _count(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise OSError(errno.EIO, "Input/output error")

    def make_folder(self, path: Path) -> None:
        self._count()
        super().make_folder(path)

    def create(self, path: Path, direct: bool) -> int:
        self._count()
        return super().create(path, direct)

    def write(self, fd: int, buffer: memoryview, offset: int) -> int:
        self._count()
        return super().write(fd, buffer[:1000], offset)  # short writes, always

    def sync(self, fd: int) -> None:
        self._count()
        super().sync(fd)

    def sync_folder(self, path: Path) -> None:
        self._count()
        super().sync_folder(path)

    def rename_new(self, source: Path, target: Path) -> None:
        self._count()
        super().rename_new(source, target)


def test_a_disk_that_fails_at_any_operation_leaves_a_whole_export_or_none(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "x")
    for at in range(1, 1000):
        fs = Breaks(at)
        try:
            run_export(tmp_path / "x", tmp_path / "out", fs=fs)
        except StorageError as error:
            assert "Input/output error" in str(error)  # noqa: PT017  every failure, not one
        else:
            break
        if (tmp_path / "out").exists():  # the sync of its parent failed, after the rename
            (tmp_path / "out").rename(tmp_path / "renamed")
        assert left(tmp_path) in (["x"], ["renamed", "x"])
    assert at > 15
    assert left(tmp_path) == ["out", "renamed", "x"]


class Silent(FileSystem):
    """A disk that answers nothing of use."""

    def __init__(self, what: str) -> None:
        self.what = what

    def free_bytes(self, path: Path) -> int:
        if self.what == "free":
            raise OSError(errno.EACCES, "Permission denied")
        return super().free_bytes(path)

    def write(self, fd: int, buffer: memoryview, offset: int) -> int:
        return 0 if self.what == "write" else super().write(fd, buffer, offset)


@pytest.mark.parametrize(
    ("what", "words"), [("free", "Permission denied"), ("write", "takes no more bytes")]
)
def test_a_disk_without_an_answer_is_an_error_and_no_loop(
    tmp_path: Path, what: str, words: str
) -> None:
    make_checkpoint(tmp_path / "x")
    refused(StorageError, words, tmp_path, fs=Silent(what))


class Forgets(FileSystem):
    """A disk that does not keep what it was given."""

    def write(self, fd: int, buffer: memoryview, offset: int) -> int:
        changed = bytearray(buffer)
        if buffer.nbytes == 16:  # the norm's weights
            changed[5] ^= 1
        return super().write(fd, memoryview(changed), offset)


def test_what_does_not_read_back_as_it_was_written_is_not_kept(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "x")
    refused(StorageError, r"norm.weight does not read back", tmp_path, fs=Forgets())


def test_a_file_that_the_library_cannot_read_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, framework: str) -> object:
        raise SafetensorError(f"{path.name} in {framework}")

    make_checkpoint(tmp_path / "x")
    monkeypatch.setattr("megatrain_cli.checkpoint.reread.safe_open", refuse)
    refused(StorageError, "cannot be read back: model.safetensors in pt", tmp_path)


def test_without_the_second_look_such_a_disk_would_go_unnoticed(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "x")
    with open_checkpoint(tmp_path / "x", FileSystem()) as held:

        def nothing(held: OpenCheckpoint, folder: Path, weights: object) -> None:
            del held, folder, weights

        export(
            held, tmp_path / "out", Forgets(), dtype=None, max_file_bytes=10**9,
            card=str, reread=nothing, threads=1,
        )  # fmt: skip
    assert left(tmp_path) == ["out", "x"]


@pytest.mark.parametrize("limit", [1, 16, 100, 256, 272, 600, 10**9])
def test_files_hold_all_weights_in_order_and_as_many_as_fit(tmp_path: Path, limit: int) -> None:
    make_checkpoint(tmp_path / "x")
    with open_checkpoint(tmp_path / "x", FileSystem()) as held:
        weights = cast_weights(held, "BF16")
    files = cut_files(weights, limit)
    assert [weight for held in files.values() for weight in held] == list(weights)
    sizes = [[weight.num_bytes for weight in held] for held in files.values()]
    assert all(sum(one) <= limit or len(one) == 1 for one in sizes)
    # None could have been put into the file before.
    assert all(sum(one) + other[0] > limit for one, other in pairwise(sizes))
    count = len(files)
    names = [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    assert list(files) == (["model.safetensors"] if count == 1 else names)


def test_files_that_lack_a_weight_or_have_another_shape_are_not_taken(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "x")
    run_export(tmp_path / "x", tmp_path / "out")
    with open_checkpoint(tmp_path / "x", FileSystem()) as held:
        weights = cast_weights(held, "BF16")
        with pytest.raises(StorageError, match="was written wrongly"):
            check_written(held, tmp_path / "out", weights[1:])
        place = weights[0].place
        other = CastWeight("BF16", weights[0].part, place._replace(shape=(place.numel,)), None)
        with pytest.raises(StorageError, match="in another shape"):
            check_written(held, tmp_path / "out", (other, *weights[1:]))


def test_masters_of_the_test_are_the_models(tmp_path: Path) -> None:
    """The builder itself: FP32 exports of a model's checkpoint are the model's weights."""
    _, masters = make_model_checkpoint(tmp_path / "x", "gpt2", tied=True)
    run_export(tmp_path / "x", tmp_path / "out", dtype="F32")
    found: dict[str, F32] = {name: p.numpy() for name, p in load_whole(tmp_path / "out").items()}
    assert found.keys() == masters.keys()
    assert all(np.array_equal(found[name], masters[name]) for name in found)
