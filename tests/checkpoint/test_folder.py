"""Opening a checkpoint: what is missing, foreign or of another kind is found before any tensor."""

import errno
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from megatrain_cli.checkpoint.folder import open_checkpoint, read_manifest
from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.checkpoint.manifest import Manifest
from megatrain_cli.checkpoint.strict_json import MAX_BYTES
from megatrain_cli.checkpoint.verify import check_part
from megatrain_cli.errors import (
    CorruptError,
    IncompatibleError,
    NoCheckpointError,
    StorageError,
)
from tests.checkpoint.made import make_checkpoint, random_layers
from tests.checkpoint.opening import FS, OPTIM, WEIGHTS, open_fds, refused
from tests.checkpoint.signed import Json, change_in


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "step-00000003"
    make_checkpoint(folder, random_layers(layers=1), pending=1, aux={"training/plan.json": b"{}"})
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / whole.name)


def test_a_whole_checkpoint_opens_and_gives_its_files_back(folder: Path) -> None:
    before = open_fds()
    with open_checkpoint(folder, FS) as checkpoint:
        assert checkpoint.manifest == read_manifest(folder, FS)
        assert checkpoint.notes == ()
        assert open_fds() - before == len(checkpoint.manifest.files) + 1
        for entry in checkpoint.manifest.files:
            raw = checkpoint.read_bytes(entry.file, 0, entry.bytes)
            assert raw == (folder / entry.file).read_bytes()
        assert checkpoint.read_aux("training/plan.json") == b"{}"
        with pytest.raises(KeyError):
            checkpoint.read_aux("training/secret")
    assert open_fds() == before
    checkpoint.close()


def test_the_folder_itself_may_be_a_link(folder: Path, tmp_path: Path) -> None:  # F45
    (tmp_path / "mine").symlink_to(folder)
    open_checkpoint(tmp_path / "mine", FS).close()


def test_what_was_opened_is_read_even_after_it_was_retired(folder: Path) -> None:
    raw = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with open_checkpoint(folder, FS) as checkpoint:
        shutil.move(folder, folder.with_name(".trash-x"))
        shutil.rmtree(folder.with_name(".trash-x"))
        for part in checkpoint.manifest.parts:
            check_part(checkpoint, part)
            assert checkpoint.read_bytes(part.file, 0, part.bytes) == raw[folder / part.file]
            assert checkpoint.fd(part.file, direct=True) == checkpoint.fd(part.file)


def test_a_file_replaced_after_it_was_checked_is_not_read(folder: Path) -> None:
    with open_checkpoint(folder, FS) as checkpoint:
        (folder / WEIGHTS).rename(folder / "old")
        shutil.copyfile(folder / "old", folder / WEIGHTS)
        assert checkpoint.fd(WEIGHTS, direct=True) == checkpoint.fd(WEIGHTS)


def test_a_direct_file_is_the_same_file(folder: Path) -> None:
    with open_checkpoint(folder, FS) as checkpoint:
        direct = checkpoint.fd(OPTIM, direct=True)
        assert direct == checkpoint.fd(OPTIM, direct=True)
        assert os.path.sameopenfile(direct, checkpoint.fd(OPTIM))


def test_no_folder_and_no_manifest_are_no_checkpoint(folder: Path) -> None:  # F36
    (folder / "manifest.json").unlink()
    refused(folder, NoCheckpointError, "never finished: no manifest")
    refused(folder / "nowhere", NoCheckpointError, "no such folder")
    (folder / "checkpoints").mkdir()
    refused(folder / "checkpoints", NoCheckpointError, f"Did you mean {folder}?")
    with pytest.raises(NoCheckpointError):
        read_manifest(folder, FS)


def test_a_torn_or_empty_manifest_is_damaged(folder: Path) -> None:  # F36
    raw = (folder / "manifest.json").read_bytes()
    for length in (0, 1, len(raw) // 2, len(raw) - 1):
        (folder / "manifest.json").write_bytes(raw[:length])
        refused(folder, CorruptError, "torn or damaged|changed after")


def test_a_manifest_of_a_newer_version_is_incompatible(folder: Path) -> None:  # F33
    change_in(folder, lambda value: value["format"].update(major=2))
    refused(folder, IncompatibleError, r"this version reads 1\.x")


def test_a_huge_manifest_is_not_read(folder: Path) -> None:  # F44
    os.truncate(folder / "manifest.json", MAX_BYTES + 1)
    refused(folder, CorruptError, "more than a manifest has")


def test_each_missing_file_is_found(folder: Path) -> None:  # F37, F53
    for entry in read_manifest(folder, FS).files:
        (folder / entry.file).rename(folder / "away")
        refused(folder, CorruptError, f"{entry.file}: missing, though manifest.json names it")
        (folder / "away").rename(folder / entry.file)
    shutil.rmtree(folder / "training")
    refused(folder, CorruptError, "training/.*: missing")


def test_each_file_of_another_size_is_found(folder: Path) -> None:  # F10, F39, F53
    for entry in read_manifest(folder, FS).files:
        path = folder / entry.file
        for size, what in ((0, "truncated"), (entry.bytes - 1, "truncated"),
                           (entry.bytes + 1, "too long")):  # fmt: skip
            os.truncate(path, size)
            refused(folder, CorruptError, f"{what}: {size} bytes, the manifest says {entry.bytes}")
        os.truncate(path, entry.bytes)


def as_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def as_socket(path: Path) -> None:
    path.unlink()
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's name has at most 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.chdir(here)


@pytest.mark.parametrize("file", [WEIGHTS, OPTIM, "config.json", "manifest.json"])
@pytest.mark.parametrize("turn", [as_link, as_pipe, as_folder, as_socket])
def test_another_kind_of_file_is_refused_at_once(  # F45
    folder: Path, file: str, turn: Callable[[Path], None]
) -> None:
    turn(folder / file)
    refused(folder, CorruptError, "a link, folder, pipe or device")


def test_a_device_is_refused_before_it_is_read() -> None:  # F45
    class Device(FileSystem):
        def open_file(self, folder_fd: int, name: str, direct: bool) -> int:
            return os.open("/dev/zero", os.O_RDONLY)

    with pytest.raises(CorruptError, match="a link, folder, pipe or device"):
        read_manifest(Path("/"), Device())


def test_a_linked_subfolder_is_refused(folder: Path) -> None:  # F45
    as_link(folder / "training")
    refused(folder, CorruptError, "a link, folder, pipe or device")


@pytest.mark.parametrize("file", ["../run.json", "/etc/passwd", "training/../../x", "a\0b", ".."])
def test_a_name_that_leads_out_is_refused_before_it_is_opened(folder: Path, file: str) -> None:
    def change(value: Json) -> None:  # F45
        value["aux"][0]["file"] = file

    change_in(folder, change)
    refused(folder, CorruptError, "not a possible manifest: aux.0.file")


def test_an_aux_file_of_a_terabyte_is_not_read(folder: Path) -> None:
    os.truncate(folder / "config.json", 1 << 40)

    def change(value: Json) -> None:
        value["bytes_total"] += (1 << 40) - value["aux"][0]["bytes"]
        value["aux"][0]["bytes"] = 1 << 40

    change_in(folder, change)
    with open_checkpoint(folder, FS) as checkpoint, pytest.raises(CorruptError, match="at once"):
        checkpoint.read_aux("config.json")


class Failing(FileSystem):
    """Answers one call with an error, or reads a few bytes at a time."""

    def __init__(self, call: str = "", code: int = 0, most: int = 1 << 30) -> None:
        self.call, self.code, self.most = call, code, most

    def _maybe(self, call: str) -> None:
        if call == self.call:
            raise OSError(self.code, os.strerror(self.code))

    def open_folder(self, path: Path) -> int:
        self._maybe("open_folder")
        return super().open_folder(path)

    def list_folder(self, path: Path) -> list[str]:
        self._maybe("list_folder")
        return super().list_folder(path)

    def open_file(self, folder_fd: int, name: str, direct: bool) -> int:
        self._maybe(f"open {name}")
        if direct:
            self._maybe("direct")
        return super().open_file(folder_fd, name, direct)

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        self._maybe("read")
        return 0 if self.most == 0 else super().read(fd, buffer[: self.most], offset)


@pytest.mark.parametrize(
    "call", ["open_folder", "list_folder", "open manifest.json", f"open {OPTIM}"]
)
@pytest.mark.parametrize("code", [errno.EACCES, errno.EMFILE])
def test_a_refusal_of_the_system_is_no_damage(whole: Path, call: str, code: int) -> None:
    before = open_fds()
    with pytest.raises(StorageError, match=f"cannot be opened: {os.strerror(code)}"):
        open_checkpoint(whole, Failing(call, code))
    assert open_fds() == before


def test_a_disk_that_does_not_read_is_named(whole: Path) -> None:
    with pytest.raises(CorruptError, match=r"reading .* bytes at 0 failed: Input/output error"):
        open_checkpoint(whole, Failing("read", errno.EIO))
    with pytest.raises(CorruptError, match="ended at byte 0 while it was read"):
        open_checkpoint(whole, Failing(most=0))


def test_bytes_that_come_in_pieces_are_put_together(whole: Path) -> None:
    with open_checkpoint(whole, Failing(most=7)) as checkpoint:
        size = (whole / WEIGHTS).stat().st_size
        assert checkpoint.read_bytes(WEIGHTS, 3, size - 3) == (whole / WEIGHTS).read_bytes()[3:]
    assert Manifest.from_bytes((whole / "manifest.json").read_bytes()) == checkpoint.manifest


def test_without_direct_reads_the_ordinary_file_is_given(whole: Path) -> None:
    with open_checkpoint(whole, Failing("direct", errno.EINVAL)) as checkpoint:
        assert checkpoint.fd(WEIGHTS, direct=True) == checkpoint.fd(WEIGHTS)
