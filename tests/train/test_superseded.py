"""What a resumed run leaves behind is set aside whole, and the journal has each step once."""

import errno
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.checkpoint.names import step_of
from megatrain_cli.errors import CorruptError, StorageError
from megatrain_cli.train.superseded import cut_journal, later_folders, make_way, set_aside
from tests.train.killed import every_death

FS = FileSystem()


def lines(*steps: int) -> str:
    return "".join(json.dumps({"step": step, "loss": 0.5}) + "\n" for step in steps)


@given(st.integers(0, 9), st.integers(0, 9), st.booleans())
def test_lines_beyond_the_step_move_and_no_other(
    tmp_path_factory: pytest.TempPathFactory, last: int, step: int, cut: bool
) -> None:
    journal = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    journal.write_text(lines(*range(1, last + 1)) + '{"step": 1' * cut)
    before = journal.read_bytes()
    moved = cut_journal(FS, journal, step, attempt=4)
    aside = journal.parent / "superseded" / "metrics-4.jsonl"
    assert moved == max(0, last - step)
    if moved:
        assert journal.read_text() == lines(*range(1, step + 1))
        assert aside.read_text() == lines(*range(step + 1, last + 1))
    else:
        assert journal.read_bytes() == before
        assert not aside.parent.exists()


def test_a_run_without_a_journal_has_nothing_to_cut(tmp_path: Path) -> None:
    assert cut_journal(FS, tmp_path / "metrics.jsonl", 0, 1) == 0


def test_no_line_is_lost_whenever_the_cut_is_killed(tmp_path: Path) -> None:
    journal = tmp_path / "metrics.jsonl"
    whole = lines(*range(1, 8))
    journal.write_text(whole)
    for death in every_death(lambda fs, attempt: _cut(fs, journal, attempt)):
        kept = journal.read_text().splitlines()
        aside = [p.read_text() for p in sorted(tmp_path.glob("superseded/metrics-*.jsonl"))]
        found = set(kept).union(*(text.splitlines() for text in aside))
        assert found == set(whole.splitlines()), death
        shutil.rmtree(tmp_path / "superseded", ignore_errors=True)  # each death on its own
        # The next start is another attempt, and does the rest.
        cut_journal(FS, journal, 5, attempt=death + 1000)
        assert journal.read_text() == lines(1, 2, 3, 4, 5)
        journal.write_text(whole)
    assert journal.read_text() == lines(1, 2, 3, 4, 5)


def _cut(fs: FileSystem, journal: Path, attempt: int) -> None:
    cut_journal(fs, journal, 5, attempt)


@pytest.mark.parametrize("bad", ["x", "[]", '{"loss": 1}', '{"step": "3"}', "[" * 100_000])
def test_a_whole_line_that_is_no_record_is_named(bad: str, tmp_path: Path) -> None:
    journal = tmp_path / "metrics.jsonl"
    journal.write_text(lines(1) + bad + "\n" + lines(2))
    with pytest.raises(CorruptError, match=r"metrics\.jsonl:2: not a step record"):
        cut_journal(FS, journal, 1, 1)
    journal.unlink()
    journal.mkdir()
    with pytest.raises(StorageError):
        cut_journal(FS, journal, 1, 1)


def make_checkpoints(run: Path, *names: str) -> None:
    for name in names:
        (run / "checkpoints" / name).mkdir(parents=True)
        (run / "checkpoints" / name / "file").write_text(name)


def test_later_folders_go_by_number_and_whole_or_not(tmp_path: Path) -> None:
    """F47: as text, step-9900 would come after step-10000."""
    checkpoints = tmp_path / "checkpoints"
    assert later_folders(FS, checkpoints, 0) == []
    make_checkpoints(
        tmp_path, "step-9900", "step-10000", "step-00000099", ".tmp-step-00020000-x", "step-x"
    )
    found = [path.name for path in later_folders(FS, checkpoints, 99)]
    assert found == ["step-10000", "step-9900"]
    with pytest.raises(StorageError):
        later_folders(FS, checkpoints / "step-9900" / "file", 0)


def test_a_rewind_moves_and_does_not_delete_and_may_happen_again(tmp_path: Path) -> None:
    for attempt in (2, 3):
        make_checkpoints(tmp_path, "step-00000003", "step-00000004")
        later = later_folders(FS, tmp_path / "checkpoints", 2)
        moved = set_aside(FS, tmp_path, later, attempt)
        assert [p.name for p in moved] == [f"step-0000000{n}-{attempt}" for n in (4, 3)]
        assert [(p / "file").read_text() for p in moved] == ["step-00000004", "step-00000003"]
        assert list((tmp_path / "checkpoints").iterdir()) == []
    make_checkpoints(tmp_path, "step-00000003")
    with pytest.raises(StorageError, match="File exists"):
        set_aside(FS, tmp_path, later_folders(FS, tmp_path / "checkpoints", 2), 3)
    assert (tmp_path / "checkpoints" / "step-00000003" / "file").exists()


def test_no_checkpoint_is_lost_whenever_a_rewind_is_killed(tmp_path: Path) -> None:
    names = ["step-00000003", "step-00000004", "step-00000005"]
    make_checkpoints(tmp_path, *names)
    for death in every_death(lambda fs, attempt: _rewind(fs, tmp_path, attempt)):
        left = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
        assert left == names[: len(left)]  # the last goes first: what is left is a shorter run
        aside = [(p / "file").read_text() for p in tmp_path.glob(f"superseded/*-{death}")]
        assert sorted([*left, *aside]) == names
        make_checkpoints(tmp_path, *names[len(left) :])
    assert list((tmp_path / "checkpoints").iterdir()) == []


def _rewind(fs: FileSystem, run: Path, attempt: int) -> None:
    set_aside(fs, run, later_folders(fs, run / "checkpoints", 2), attempt)


class TwoDisks(FileSystem):
    """`checkpoints` is a link to another disk."""

    def rename_new(self, source: Path, target: Path) -> None:
        if "checkpoints" in source.parts and "checkpoints" not in target.parts:
            raise OSError(errno.EXDEV, "Invalid cross-device link", str(source))
        super().rename_new(source, target)


def test_checkpoints_on_another_disk_are_set_aside_there(tmp_path: Path) -> None:
    make_checkpoints(tmp_path, "step-00000003")
    [moved] = set_aside(TwoDisks(), tmp_path, [tmp_path / "checkpoints" / "step-00000003"], 2)
    assert moved == tmp_path / "checkpoints" / "superseded" / "step-00000003-2"
    assert (moved / "file").read_text() == "step-00000003"
    assert later_folders(FS, tmp_path / "checkpoints", 0) == []


class ReadOnly(FileSystem):
    def make_folder(self, path: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))


def test_a_place_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    make_checkpoints(tmp_path, "step-00000003")
    with pytest.raises(StorageError, match="Read-only"):
        set_aside(ReadOnly(), tmp_path, [tmp_path / "checkpoints" / "step-00000003"], 1)


def test_a_name_is_freed_by_another_spelling_of_the_same_step(tmp_path: Path) -> None:
    make_checkpoints(tmp_path, "step-00000003")
    other = make_way(FS, tmp_path / "checkpoints" / "step-00000003")
    assert (other / "file").read_text() == "step-00000003"
    assert [path.name for path in other.parent.iterdir()] == ["step-000000003"]
    assert step_of(other.name) == 3
    assert make_way(FS, other) == other, "it is free already"
