"""After any crash the resolver goes on from a whole checkpoint that is not older than was told."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from megatrain_cli.checkpoint.commit import write_checkpoint, write_latest
from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.checkpoint.manifest import Manifest
from megatrain_cli.checkpoint.names import MANIFEST, step_of
from megatrain_cli.checkpoint.remove import remove_checkpoint
from megatrain_cli.checkpoint.resolve import resolve
from megatrain_cli.checkpoint.write import FileWriter
from megatrain_cli.errors import NoCheckpointError
from megatrain_cli.train.superseded import make_way, set_aside
from tests.checkpoint.crashes import Op, RecordingFileSystem, Tree, crash_states, lay_out, tree_at
from tests.checkpoint.made import make_checkpoint, random_layers

FS = FileSystem()
LAYERS = random_layers(layers=0)


def commit(
    fs: RecordingFileSystem, root: Path, made: Path, number: int, step: int, attempt: int = 1
) -> Path:
    """Save a real checkpoint, tell its number, and write the hint."""
    writer = FileWriter(fs)
    manifest = make_checkpoint(made / str(number), LAYERS, step=step, attempt=attempt)
    tree = tree_at(made / str(number))

    def fill(folder: Path) -> bytes:
        for name, data in sorted(tree.items()):
            if data is not None and name != MANIFEST:
                writer.write(folder / name, name, [data])
        return tree[MANIFEST] or b""

    done = write_checkpoint(fs, root / "checkpoints", manifest.step, fill)
    fs.tell("committed", number)
    write_latest(fs, done.folder, manifest.id, manifest.attempt)
    return done.folder


def record(root: Path, made: Path) -> RecordingFileSystem:
    """Save two checkpoints; the first is removed."""
    fs = RecordingFileSystem(root)
    old = commit(fs, root, made, 3, step=3)
    commit(fs, root, made, 4, step=4)
    remove_checkpoint(fs, old)
    return fs


def record_anew(root: Path, made: Path, *, aside_first: bool) -> list[Op]:
    """Save a step, and in the next attempt once more, as where the first is of half an update."""
    root.mkdir()
    fs = RecordingFileSystem(root)
    old = commit(fs, root, made, 1, step=3, attempt=1)
    if aside_first:
        set_aside(fs, root, [old], 2)
        commit(fs, root, made, 2, step=3, attempt=2)
    else:
        old = make_way(fs, old)
        commit(fs, root, made, 2, step=3, attempt=2)
        set_aside(fs, root, [old], 2)
    return fs.log


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resolve")


@pytest.fixture(scope="module")
def log(root: Path) -> list[Op]:
    (root / "run").mkdir()
    return record(root / "run", root / "made").log


def outcomes(root: Path, log: Sequence[Op], folder: Path) -> set[tuple[int, int]]:
    """The number last told, and the one that is found after a crash, 0 for none: all that occur."""
    whole = {int(made.name): tree_at(made) for made in (root / "made").iterdir()}
    found: dict[frozenset[tuple[str, bytes | None]], int] = {}
    pairs: set[tuple[int, int]] = set()
    for done, tree in crash_states(log):
        told = max((op.told for op in log[:done] if op.kind == "committed"), default=0)
        # One tree for each that looks the same but below what is never read.
        seen = frozenset(
            (path, data)
            for path, data in tree.items()
            if path.count("/") == 1 or not path.startswith("checkpoints/.")
        )
        if seen not in found:
            found[seen] = number_found(folder / f"crash-{len(found)}", tree, whole)
        pairs.add((told, found[seen]))
    return pairs


def test_after_any_crash_the_newest_that_was_told_or_a_newer_one_is_found(
    root: Path, log: list[Op], tmp_path: Path
) -> None:
    assert outcomes(root, log, tmp_path) == {(0, 0), (0, 3), (3, 3), (3, 4), (4, 4)}


def test_without_the_sync_of_the_commit_point_an_older_one_is_found(
    root: Path, log: list[Op], tmp_path: Path
) -> None:
    less = [op for op in log if op != Op("sync_folder", "checkpoints")]
    assert {(3, 0), (4, 0)} <= outcomes(root, less, tmp_path)


def test_a_step_that_is_saved_anew_is_found_after_any_crash(tmp_path: Path) -> None:
    log = record_anew(tmp_path / "run", tmp_path / "made", aside_first=False)
    (tmp_path / "crashes").mkdir()
    found = outcomes(tmp_path, log, tmp_path / "crashes")
    assert found == {(0, 0), (0, 1), (1, 1), (1, 2), (2, 2)}


def test_if_the_old_one_went_aside_first_a_crash_would_leave_none(tmp_path: Path) -> None:
    log = record_anew(tmp_path / "run", tmp_path / "made", aside_first=True)
    (tmp_path / "crashes").mkdir()
    assert (1, 0) in outcomes(tmp_path, log, tmp_path / "crashes")


def number_found(root: Path, tree: Tree, whole: dict[int, Tree]) -> int:
    """What the resolver picks in a crashed run, compared with what was saved; 0 for nothing."""
    lay_out(root, tree)
    try:
        checkpoint, _ = resolve(root, FS)
    except NoCheckpointError:
        return 0
    with checkpoint:
        found = tree_at(checkpoint.folder)
        [number] = [number for number, made in whole.items() if made == found]
        assert step_of(checkpoint.folder.name) == checkpoint.manifest.step
        assert checkpoint.manifest == Manifest.from_bytes(whole[number][MANIFEST] or b"")
    return number
