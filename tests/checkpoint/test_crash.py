"""Whatever a crash leaves: published is whole, acknowledged is there, and there is always one."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.checkpoint.remove import remove_leftovers
from tests.checkpoint.crashes import (
    Disk,
    Op,
    RecordingFileSystem,
    Tree,
    crash_states,
    lay_out,
    tree_at,
)
from tests.checkpoint.saves import checkpoints_in, save, save_in_place

STEPS = (10, 20, 30)


def record(root: Path, *, atomic_rename: bool = True) -> list[Op]:
    """The log of three saves, each followed by the hint and by the removal of the one before."""
    root.mkdir()
    fs = RecordingFileSystem(root, renames_folders=atomic_rename)
    for step in STEPS:
        save(fs, root / "checkpoints", step, fs.tell, atomic_rename=atomic_rename)
    return fs.log


def faults(log: Sequence[Op], done: int, tree: Tree, *, strict: bool = True) -> list[str]:
    """What is wrong with what a crash left, after `done` operations of the log.

    `strict`: a folder with its final name must be whole; else only one with a valid manifest.
    """
    found = checkpoints_in(tree)
    happened = log[:done]
    acknowledged = {op.told for op in happened if op.kind == "committed"}
    retired = {op.told for op in happened if op.kind == "retired"}
    wrong = [
        f"I1: {step} is published and not whole"
        for step, state in found.items()
        if state == "torn" or (strict and state == "no manifest")
    ]
    wrong += [
        f"I2: {step} was acknowledged and is lost"
        for step in acknowledged - retired
        if found.get(step) != "whole"
    ]
    if acknowledged and "whole" not in found.values():
        wrong.append("I3: there is no whole checkpoint any more")
    hint = tree.get("checkpoints/latest.json")
    if hint is not None:
        try:
            json.loads(hint)
        except ValueError:
            wrong.append("I5: the hint is torn")
    return wrong


def violations(log: Sequence[Op], *, strict: bool = True) -> set[str]:
    """Which invariants some crash breaks."""
    return {
        wrong[:2]
        for done, tree in crash_states(log)
        for wrong in faults(log, done, tree, strict=strict)
    }


def without(log: Sequence[Op], dropped: Callable[[Op], bool]) -> list[Op]:
    kept = [op for op in log if not dropped(op)]
    assert len(kept) < len(log), "the control removes something"
    return kept


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> list[Op]:
    return record(tmp_path_factory.mktemp("crash") / "run")


def test_no_crash_breaks_an_invariant(log: list[Op]) -> None:
    states = list(crash_states(log))
    assert len(states) > 2000
    for done, tree in states:
        assert not faults(log, done, tree), f"after {done} operations, {log[done - 1]}"


def test_the_model_of_the_disk_agrees_with_the_disk(tmp_path: Path) -> None:
    disk = Disk()
    for op in record(tmp_path / "run"):
        disk.apply(op)
    assert disk.now() == tree_at(tmp_path / "run")


def a_file(part: str) -> Callable[[Op], bool]:
    return lambda op: op.kind == "sync" and part in op.path


def a_folder(*ends: str) -> Callable[[Op], bool]:
    return lambda op: (
        op.kind == "sync_folder"
        and any(
            op.path == end or (end.startswith("*") and op.path.endswith(end[1:])) for end in ends
        )
    )


def the_folder_of_a_save(op: Op) -> bool:
    return op.kind == "sync_folder" and ".tmp-step" in op.path and "training" not in op.path


CONTROLS = {
    "a weights file": (a_file("model-embed"), {"I1", "I2", "I3"}),
    "an optimizer file": (a_file("optim-embed"), {"I1", "I2", "I3"}),
    "a small file": (a_file("config.json"), {"I1", "I2", "I3"}),
    "the manifest": (a_file("manifest.json"), {"I1", "I2", "I3"}),
    "training/": (a_folder("*/training"), {"I1", "I2", "I3"}),
    "the temporary folder": (the_folder_of_a_save, {"I1", "I2", "I3"}),
    # Every sync of it: that of the hint, and that of a removal, would make a commit durable too,
    # later. And a removal's files would go before its new name is known.
    "the parent": (a_folder("checkpoints"), {"I1", "I2", "I3"}),
    "the run's folder": (a_folder(""), {"I2", "I3"}),
    "the hint": (a_file("latest.json"), {"I5"}),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_without_the_sync_of_it_a_crash_does_damage(log: list[Op], name: str) -> None:
    dropped, wanted = CONTROLS[name]
    assert violations(without(log, dropped)) == wanted


def without_sync_after_rename_to(name: str, log: Sequence[Op]) -> list[Op]:
    """The log without the syncs of the parent that come right after such renames."""
    gone = {
        index + 1
        for index, op in enumerate(log)
        if op.kind == "rename" and op.target.startswith(f"checkpoints/{name}")
    }
    assert gone
    assert all(log[index] == Op("sync_folder", "checkpoints") for index in gone)
    return [op for index, op in enumerate(log) if index not in gone]


def test_each_single_sync_of_the_parent_has_its_own_reason(log: list[Op]) -> None:
    # Without that of the commit point, what was acknowledged can be lost until the next one.
    assert violations(without_sync_after_rename_to("step-", log)) == {"I2", "I3"}
    # Without that of a removal, files can be gone while the old name is still there.
    assert violations(without_sync_after_rename_to(".trash-", log)) == {"I1"}
    # Without that of the hint, a crash leaves the old hint, which is as good: no reader trusts it.
    assert violations(without_sync_after_rename_to("latest.json", log)) == set()


def test_without_renames_the_manifest_alone_says_what_is_whole(tmp_path: Path) -> None:
    log = record(tmp_path / "run", atomic_rename=False)
    assert violations(log, strict=False) == set()
    folder = without(log, lambda op: op.kind == "sync_folder" and op.path.endswith("0"))
    assert violations(folder, strict=False) == {"I1", "I2", "I3"}


def test_writing_into_the_final_folder_is_found_broken(tmp_path: Path) -> None:
    fs = RecordingFileSystem(tmp_path)
    for step in STEPS:
        save_in_place(fs, tmp_path / "checkpoints", step, fs.tell)
    assert violations(fs.log) == {"I1", "I2", "I3"}


def test_cleaning_up_after_any_crash_leaves_the_checkpoints_and_nothing_else(
    log: list[Op], tmp_path: Path
) -> None:
    seen: set[tuple[str, ...]] = set()
    for _, tree in crash_states(log):
        names = tuple(sorted(path for path in tree if path.count("/") == 1))
        if names in seen:
            continue
        seen.add(names)
        root = tmp_path / str(len(seen))
        lay_out(root, tree)
        checkpoints = root / "checkpoints"
        wanted = checkpoints_in(tree)
        removed = remove_leftovers(FileSystem(), checkpoints)
        assert not [name for name in removed if not name.startswith((".tmp-", ".trash-"))]
        left = sorted(path.name for path in checkpoints.glob("*"))
        assert [name for name in left if name != "latest.json"] == [
            f"step-{step:08d}" for step in sorted(wanted)
        ]
        assert checkpoints_in(tree_at(root)) == wanted
    assert len(seen) > 10
