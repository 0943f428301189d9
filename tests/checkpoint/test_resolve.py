"""Which checkpoint a run goes on from: by (attempt, step) as integers, whole ones only."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.checkpoint.manifest import Manifest
from megatrain_cli.checkpoint.names import folder_name, step_of
from megatrain_cli.checkpoint.resolve import (
    Candidate,
    candidates,
    is_checkpoint,
    is_run,
    pick,
    resolve,
)
from megatrain_cli.errors import ClosedError, NoCheckpointError, StorageError
from tests.checkpoint.made import make_checkpoint, random_layers
from tests.checkpoint.opening import FS, WEIGHTS, open_fds
from tests.checkpoint.signed import change_in

LAYERS = random_layers(layers=0)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return make_checkpoint(tmp_path_factory.mktemp("x") / "c", LAYERS)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "checkpoints").mkdir()
    return tmp_path


def add(
    run: Path, step: int, attempt: int = 1, name: str | None = None, run_id: str = "run-1"
) -> Path:
    folder = run / "checkpoints" / (name or f"step-{step:08d}")
    make_checkpoint(folder, LAYERS, step=step, attempt=attempt, run_id=run_id)
    return folder


def hint(run: Path, text: str | bytes) -> None:
    raw = text if isinstance(text, bytes) else json.dumps({"checkpoint": text}).encode()
    (run / "checkpoints" / "latest.json").write_bytes(raw)


def chosen(run: Path, run_id: str | None = None) -> tuple[Path, tuple[str, ...]]:
    before = open_fds()
    checkpoint, notes = resolve(run, FS, run_id)
    checkpoint.close()
    assert open_fds() == before
    assert all(note.isprintable() for note in notes)
    return checkpoint.folder, notes


@pytest.mark.parametrize(("old", "new"), [(99, 100), (9900, 10000), (9, 10), (99999999, 10**8)])
def test_steps_are_compared_as_numbers(run: Path, old: int, new: int) -> None:  # F47
    wanted = add(run, new, name=f"step-{new}")
    add(run, old, name=f"step-{old}")
    os.utime(wanted, (1, 1))  # clocks are not asked
    assert chosen(run) == (wanted, ())


@given(
    st.lists(st.tuples(st.none() | st.integers(0, 10**20), st.integers(0, 10**18 - 1)), max_size=6)
)
def test_the_order_is_attempt_then_step_for_any_numbers(
    manifest: Manifest, made: list[tuple[int | None, int]]
) -> None:  # F47, F48
    found = [
        Candidate(
            Path(f"step-{step}"),
            step,
            None if attempt is None else manifest.model_copy(update={"attempt": attempt}),
            "unreadable" if attempt is None else None,
        )
        for attempt, step in made
    ]
    best = pick(sorted(found, key=lambda one: one.order, reverse=True))
    known = [(attempt, step) for attempt, step in made if attempt is not None]
    if best is None:
        assert known == []
    else:
        assert best.manifest is not None
        assert (best.manifest.attempt, best.step) == max(known)


@pytest.mark.parametrize("step", [0, 9, 100, 99_999_999, 100_000_000, 10**17])
def test_a_steps_folder_tells_the_step(step: int) -> None:
    assert step_of(folder_name(step)) == step


@pytest.mark.parametrize(
    "name",
    ["step-", "step--1", "step-1.partial", "step-\u0661", "Step-1", ".tmp-step-1", "step-1\n"],
)
def test_other_names_tell_no_step(name: str) -> None:
    assert step_of(name) is None


def test_a_later_attempt_wins_over_a_stale_higher_step(run: Path) -> None:  # F48
    add(run, 5000, attempt=1)
    wanted = add(run, 1200, attempt=2)
    add(run, 1000, attempt=2)
    add(run, 900, attempt=10, name="step-900")
    assert chosen(run)[0].name == "step-900"
    shutil.rmtree(run / "checkpoints" / "step-900")
    assert chosen(run) == (wanted, ())


def test_the_hint_only_tells_two_spellings_of_a_step_apart(run: Path) -> None:
    add(run, 5, name="step-5")
    add(run, 5, name="step-05")
    for name in ("step-5", "step-05", "step-5"):
        hint(run, name)
        assert chosen(run)[0].name == name


def test_the_hint_of_a_killed_save_does_not_hide_the_newest(run: Path) -> None:  # F07
    hint(run, add(run, 8).name)
    wanted = add(run, 10)
    folder, (note,) = chosen(run)
    assert folder == wanted
    assert "latest.json names step-00000008; the newest whole checkpoint is step-00000010" in note


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"\xff", b"[]", b"3", b"[" * 60_000, b"x" * 100_000, b'{"checkpoint": 3}', "..",
     "../step-3", "/etc", "step-3/../step-3", "run.json", "step-1\x1b[2J", "step-00000777"],
)  # fmt: skip
def test_a_hint_that_leads_nowhere_is_ignored_with_a_note(
    run: Path, text: str | bytes
) -> None:  # F07, F46
    wanted = add(run, 3)
    hint(run, text)
    folder, (note,) = chosen(run)
    assert folder == wanted
    assert "latest.json" in note
    assert "ignored" in note


def test_a_hint_that_is_no_file_is_ignored_with_a_note(run: Path) -> None:  # F46
    wanted = add(run, 3)
    for make in (
        lambda path: path.mkdir(), lambda path: path.symlink_to("/etc/passwd"), os.mkfifo,
    ):  # fmt: skip
        path = run / "checkpoints" / "latest.json"
        make(path)
        folder, (note,) = chosen(run)
        assert folder == wanted
        assert "ignored" in note
        path.rmdir() if path.is_dir() else path.unlink()


def test_a_hint_to_a_broken_checkpoint_is_ignored_with_a_note(run: Path) -> None:  # F46, F54
    wanted = add(run, 3)
    for step in (2, 4):
        broken = add(run, step)
        (broken / WEIGHTS).unlink()
        hint(run, broken.name)
        folder, notes = chosen(run)
        assert folder == wanted
        assert f"latest.json names {broken.name}" in notes[-1]


def test_a_broken_newest_falls_back_and_both_are_named(run: Path) -> None:  # F54
    wanted = add(run, 3)
    (add(run, 4) / WEIGHTS).unlink()
    (add(run, 5) / "manifest.json").unlink()
    (add(run, 6) / "manifest.json").write_bytes(b"{")
    folder, notes = chosen(run)
    assert folder == wanted
    assert [note.split(" is refused")[0] for note in notes] == [
        f"step-0000000{step}" for step in (6, 5, 4)
    ]
    assert all(str(wanted) in note for note in notes)
    assert "missing" in notes[2]


def test_a_checkpoint_found_bad_while_its_tensors_were_read_is_not_picked_again(
    run: Path,
) -> None:  # F54
    wanted = add(run, 3)
    bad = add(run, 4)
    checkpoint, notes = resolve(run, FS, refused={bad: "model-head: its xxh3-128 is wrong."})
    checkpoint.close()
    assert checkpoint.folder == wanted
    assert "its xxh3-128 is wrong" in notes[0]


def test_nothing_whole_is_an_error_with_every_reason(run: Path) -> None:  # F55
    (add(run, 4) / WEIGHTS).unlink()
    (add(run, 5) / "manifest.json").unlink()
    with pytest.raises(NoCheckpointError, match="no whole checkpoint") as caught:
        resolve(run, FS)
    assert caught.value.exit_code == 5
    for part in ("step-00000004 is refused", "missing", "step-00000005 is refused", "no manifest"):
        assert part in str(caught.value)


def test_no_checkpoint_is_an_error(run: Path, tmp_path: Path) -> None:  # F55
    (run / "checkpoints" / ".tmp-step-00000004-x").mkdir()
    add(run, 4, name=".trash-step-00000004-x")
    add(run, 4, name="step-00000004.partial")
    for folder in (run, tmp_path / "nowhere"):
        with pytest.raises(NoCheckpointError, match="has no checkpoint: nothing to resume from"):
            resolve(folder, FS)
        assert candidates(folder, FS) == []
    assert pick([]) is None


def test_links_and_files_named_like_checkpoints_are_refused(run: Path, tmp_path: Path) -> None:
    wanted = add(run, 3)  # F45
    add(run, 9, name="elsewhere")
    (run / "checkpoints" / "step-9").symlink_to("elsewhere")
    (run / "checkpoints" / "step-8").write_bytes(b"")
    folder, (ignored, *notes) = chosen(run)
    assert folder == wanted
    assert ignored == "checkpoints/elsewhere is ignored: its name is not `step-` and a number."
    assert len(notes) == 2
    assert all("a link or a file, where a folder belongs" in note for note in notes)


def test_a_folder_named_after_another_step_is_refused(run: Path) -> None:
    wanted = add(run, 3)
    add(run, 4, name="step-00000009")
    folder, (note,) = chosen(run)
    assert folder == wanted
    assert "is named after step 9, and holds step 4" in note


@pytest.mark.parametrize("code", [errno.EACCES, errno.EMFILE])
def test_a_newer_one_that_this_process_may_not_read_is_not_passed_over(
    code: int, run: Path
) -> None:
    """It may be whole: an older one in its place would give up its steps."""

    class Closed(FileSystem):
        def open_file(self, folder_fd: int, name: str, direct: bool) -> int:
            if name == WEIGHTS and os.readlink(f"/proc/self/fd/{folder_fd}") == str(closed):  # noqa: PTH115
                raise OSError(code, os.strerror(code))
            return super().open_file(folder_fd, name, direct)

    add(run, 3)
    closed = add(run, 4)
    with pytest.raises(ClosedError, match=r"step-00000004 may be whole, so no older one") as caught:
        resolve(run, Closed())
    assert os.strerror(code) in str(caught.value)
    closed = add(run, 2)  # an older one is nobody's business
    checkpoint, _ = resolve(run, Closed())
    with checkpoint:
        assert checkpoint.manifest.step == 4


def test_another_runs_checkpoint_is_refused(run: Path) -> None:
    wanted = add(run, 3)
    add(run, 5000, run_id="other")
    folder, (note,) = chosen(run, "run-1")
    assert folder == wanted
    assert "is of the run other, and this run is run-1" in note


def test_a_newer_format_is_refused_by_name(run: Path) -> None:  # F33
    wanted = add(run, 3)
    change_in(add(run, 4), lambda value: value["format"].update(major=2))
    folder, (note,) = chosen(run)
    assert folder == wanted
    assert "reads 1.x" in note


def test_all_candidates_are_listed_with_what_a_person_needs(run: Path) -> None:
    (add(run, 4) / WEIGHTS).unlink()
    (add(run, 3) / "KEEP").touch()
    (add(run, 2) / "notes.txt").touch()
    hint(run, "step-00000002")
    found = candidates(run, FS, "run-1")
    assert [one.step for one in found] == [4, 3, 2]
    assert [one.kept for one in found] == [False, True, False]
    assert [one.hinted for one in found] == [False, False, True]
    assert [one.problem is None for one in found] == [False, True, True]
    assert found[0].manifest is not None
    assert found[2].notes == ("'notes.txt' is not in the manifest; ignored",)
    assert pick(found) is found[1]


def test_runs_and_checkpoints_are_told_apart(run: Path) -> None:
    folder = add(run, 3)
    assert (is_run(run, FS), is_checkpoint(run, FS)) == (True, False)
    assert (is_run(folder, FS), is_checkpoint(folder, FS)) == (False, True)


class Refusing(FileSystem):
    """Does not list folders, or not look at one."""

    def list_folder(self, path: Path) -> list[str]:
        raise PermissionError(13, "Permission denied")


class Vanishing(FileSystem):
    """A checkpoint that is retired between the listing and the look, or between two looks."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def is_folder(self, path: Path) -> bool:
        if self.looks == 0:
            raise FileNotFoundError(2, "No such file or directory")
        return super().is_folder(path)

    def open_folder(self, path: Path) -> int:
        self.looks -= path.name.startswith("step-")
        if self.looks == 0:
            raise FileNotFoundError(2, "No such file or directory")
        return super().open_folder(path)


def test_a_folder_that_cannot_be_listed_is_an_error(run: Path) -> None:
    with pytest.raises(StorageError, match="cannot be read: Permission denied"):
        resolve(run, Refusing())


@pytest.mark.parametrize("looks", [0, 1, 2, 3])
def test_a_checkpoint_that_vanishes_meanwhile_is_refused(run: Path, looks: int) -> None:
    add(run, 3)
    with pytest.raises(NoCheckpointError, match="step-00000003 is refused"):
        resolve(run, Vanishing(looks))
