"""One writer a folder: the kernel's lock decides, and the file says who holds it."""

import errno
import fcntl
import json
import os
import socket
from pathlib import Path

import pytest

from megatrain_cli.errors import LockedError, StorageError
from megatrain_cli.train import lock as module
from megatrain_cli.train.lock import RunLock


def test_the_second_is_refused_and_told_who_is_first(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    first = RunLock(path)
    first.sign()
    owner = json.loads(path.read_text())
    assert (owner["pid"], owner["host"]) == (os.getpid(), socket.gethostname())
    assert owner["nonce"]
    with pytest.raises(LockedError, match=f"in use by process {os.getpid()} on "):
        RunLock(path)
    first.check()
    first.close()
    first.close()
    RunLock(path).close()


@pytest.mark.parametrize(
    "left", ["", "garbage", "[1]", '{"pid": "x"}', '{"pid": 1, "host": "h", "nonce": "n"}']
)
def test_what_a_dead_process_left_is_no_lock(left: str, tmp_path: Path) -> None:
    """F68: not even with the process id of one that lives (1), for ids are reused."""
    path = tmp_path / "run.lock"
    path.write_text(left)
    lock = RunLock(path)
    with pytest.raises(LockedError, match=r"in use by (another process|process 1 on h)"):
        RunLock(path)
    lock.sign()
    lock.check()
    lock.close()


def test_a_holder_cannot_write_control_characters_to_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    path.write_text(json.dumps({"pid": 3, "host": "\x1b[2J"}))
    lock = RunLock(path)
    with pytest.raises(LockedError, match=r"process 3 on \\x1b"):
        RunLock(path)
    lock.close()


def test_a_lock_whose_file_was_removed_or_taken_is_noticed_before_a_save(tmp_path: Path) -> None:
    """F68: someone removes `run.lock` and starts a second run: flock alone lets both write."""
    path = tmp_path / "run.lock"
    first = RunLock(path)
    first.sign()
    path.unlink()
    with pytest.raises(LockedError, match="this run's lock was removed"):
        first.check()
    second = RunLock(path)  # the control: the kernel gives it
    second.sign()
    with pytest.raises(LockedError, match=f"was taken by process {os.getpid()}"):
        first.check()
    second.check()
    first.close()
    second.close()


def test_checkpoints_that_two_run_folders_share_by_a_link_have_one_writer(tmp_path: Path) -> None:
    """F68: each has its own `run.lock`, and would remove what the other one is writing."""
    disk, run = tmp_path / "disk", tmp_path / "run"
    (disk / "checkpoints").mkdir(parents=True)
    run.mkdir()
    (run / "checkpoints").symlink_to(disk / "checkpoints")
    for first, second in ((run, disk), (disk, run)):
        lock = RunLock(first / "run.lock")
        with pytest.raises(LockedError, match=f"^{second}/checkpoints is in use by a process of"):
            RunLock(second / "run.lock")
        lock.close()


def test_a_file_system_without_locks_or_a_full_one_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StorageError, match="cannot be written"):
        RunLock(tmp_path / "missing" / "run.lock")
    if Path("/dev/full").exists():
        (tmp_path / "run.lock").symlink_to("/dev/full")
        lock = RunLock(tmp_path / "run.lock")
        with pytest.raises(StorageError, match=r"run\.lock cannot be written"):
            lock.sign()
        lock.close()

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StorageError, match="cannot be locked: No locks available"):
        RunLock(tmp_path / "other.lock")


def test_a_machine_that_does_not_name_its_boot_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BOOT_ID", tmp_path / "missing")
    lock = RunLock(tmp_path / "run.lock")
    lock.sign()
    assert json.loads((tmp_path / "run.lock").read_text())["boot_id"] == ""
    lock.close()
