"""What a shell allows a process: it is said with numbers, and with the command that changes it."""

import errno
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.checkpoint.storage import storage_error
from megatrain_cli.data.cache import disk_errors
from megatrain_cli.errors import StorageError
from megatrain_cli.limits import advice_on_size, note_on_cpu_time
from megatrain_cli.report.journal import Journal
from tests.report.test_journal import record
from tests.train.live import train_here
from tests.train.workspace import make_workspace

TOO_LARGE = OSError(errno.EFBIG, "File too large")
RAISE_IT = r"`ulimit -f` allows files of up to 20\.0 KiB: raise it \(`ulimit -f unlimited`\)\."


@contextmanager
def largest_files_of(num_bytes: int) -> Iterator[None]:
    """As `ulimit -S -f`, in its block."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_no_limit_on_files_is_of_the_file_system() -> None:
    assert advice_on_size(OSError(errno.ENOSPC, "full")) is None
    assert advice_on_size(TOO_LARGE) == (
        "The file system allows no file of that size: use another disk."
    )


def test_each_that_writes_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with largest_files_of(20 << 10):
        said = str(storage_error(FileSystem(), tmp_path, TOO_LARGE, 1))
        assert re.search(rf" is free\. {RAISE_IT} What was saved", said)
        with (
            pytest.raises(StorageError, match=rf"too large\. {RAISE_IT}$"),
            disk_errors(tmp_path),
        ):
            (tmp_path / "rows").write_bytes(bytes(21 << 10))
        path.write_bytes(b"\n" * (20 << 10))
        with (
            pytest.raises(StorageError, match=rf"metrics\.jsonl: .*too large\. {RAISE_IT}$"),
            Journal(path, patient=lambda text: None) as journal,
        ):
            journal.write(record(1))


def test_a_run_whose_checkpoint_has_too_large_a_file_does_not_begin(tmp_path: Path) -> None:
    """Else it would train up to its first save, and lose all."""
    config = make_workspace(tmp_path)
    wanted = (
        r"checkpoints: a checkpoint has files of up to 34\.0 KiB, and `ulimit -f` allows no more "
        r"than 20\.0 KiB\. Raise it \(`ulimit -f unlimited`\)\.$"
    )
    with (
        largest_files_of(20 << 10),
        pytest.raises(StorageError, match=wanted),
    ):
        train_here(config)
    assert not list((tmp_path / "run").glob("checkpoints/*"))
    with largest_files_of(64 << 10):
        train_here(config, f"train.output_dir={tmp_path / 'other'}")


def test_a_limit_of_cpu_time_that_kills_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below a lower soft one a run stops and saves, so there is nothing to say."""
    for soft, hard, is_told in (
        (3600, 3600, True),
        (3000, 3600, False),
        (3600, resource.RLIM_INFINITY, False),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, False),
    ):
        found = (soft, hard)
        monkeypatch.setattr(resource, "getrlimit", lambda kind, found=found: found)
        note = note_on_cpu_time()
        assert (note is not None) == is_told
        assert note is None or "may use 3600 s of CPU time" in note
