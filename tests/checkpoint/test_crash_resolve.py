"""After any crash the resolver goes on from a whole checkpoint that is not older than was told."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from megatrain_cli.checkpoint.commit import write_checkpoint, write_latest
from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.checkpoint.manifest import Manifest
from megatrain_cli.checkpoint.names import MANIFEST, folder_name, step_of
from megatrain_cli.checkpoint.remove import remove_checkpoint
from megatrain_cli.checkpoint.resolve import resolve
from megatrain_cli.checkpoint.write import FileWriter
from megatrain_cli.errors import NoCheckpointError
from tests.checkpoint.crashes import Op, RecordingFileSystem, Tree, crash_states, lay_out, tree_at
from tests.checkpoint.made import make_checkpoint, random_layers

FS = FileSystem()
LAYERS = random_layers(layers=0)


def record(root: Path, made: Path) -> RecordingFileSystem:
    """Save two real checkpoints, each followed by the hint and the removal of the one before."""
    fs = RecordingFileSystem(root)
    writer = FileWriter(fs)
    for step in (3, 4):
        manifest = make_checkpoint(made / str(step), LAYERS, step=step)
        tree = tree_at(made / str(step))

        def fill(folder: Path, tree: Tree = tree) -> bytes:
            for name, data in sorted(tree.items()):
                if data is not None and name != MANIFEST:
                    writer.write(folder / name, name, [data])
            return tree[MANIFEST] or b""

        done = write_checkpoint(fs, root / "checkpoints", step, fill)
        fs.tell("committed", step)
        write_latest(fs, done.folder, manifest.id, attempt=1)
        if step > 3:
            remove_checkpoint(fs, root / "checkpoints" / folder_name(step - 1))
    return fs


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resolve")


@pytest.fixture(scope="module")
def log(root: Path) -> list[Op]:
    (root / "run").mkdir()
    return record(root / "run", root / "made").log


def outcomes(root: Path, log: Sequence[Op], folder: Path) -> set[tuple[int, int]]:
    """The step last told, and the one that is found after a crash, 0 for none: all that occur."""
    whole = {step: tree_at(root / "made" / str(step)) for step in (3, 4)}
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
            found[seen] = step_found(folder / f"crash-{len(found)}", tree, whole)
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


def step_found(root: Path, tree: Tree, whole: dict[int, Tree]) -> int:
    """What the resolver picks in a crashed run, compared with what was saved; 0 for nothing."""
    lay_out(root, tree)
    try:
        checkpoint, _ = resolve(root, FS)
    except NoCheckpointError:
        return 0
    with checkpoint:
        step = step_of(checkpoint.folder.name)
        assert step == checkpoint.manifest.step
        assert checkpoint.manifest == Manifest.from_bytes(whole[step][MANIFEST] or b"")
        assert tree_at(checkpoint.folder) == whole[step]
    return step
