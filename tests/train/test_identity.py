"""A run keeps its identity, and each start has a higher number than all before it."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli import __version__
from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.errors import CorruptError, IncompatibleError, MegatrainError, StorageError
from megatrain_cli.train.identity import (
    Origin,
    RunIdentity,
    count_attempt,
    new_identity,
    read_identity,
    write_identity,
)
from tests.train.killed import every_death

FS = FileSystem()
RUN = "0" * 31 + "a"


@pytest.mark.parametrize("parent", [None, Origin("b" * 32, "sha256:" + "1" * 64, 7)])
def test_an_identity_is_read_as_it_was_written(parent: Origin | None, tmp_path: Path) -> None:
    assert read_identity(tmp_path) is None
    identity = new_identity(parent)
    write_identity(FS, tmp_path, identity)
    assert read_identity(tmp_path) == identity
    assert identity.megatrain == __version__
    assert new_identity().run_id != new_identity().run_id


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("", CorruptError, "is no JSON"),
        ("\xff", CorruptError, "is no JSON"),
        ("[" * 100_000, CorruptError, "is no JSON"),
        ("[]", CorruptError, "is not the identity"),
        ('{"run_id": "a"}', CorruptError, "is not the identity"),
        ('{"format": 2}', IncompatibleError, "has format 2 and this version reads 1"),
        ('{"format": 1, "run_id": "../x"}', CorruptError, "names no run"),
        (f'{{"format": 1, "run_id": "{RUN}"}}', CorruptError, "names no version"),
        (
            f'{{"format": 1, "run_id": "{RUN}", "megatrain": "1", "parent": []}}',
            CorruptError,
            "names no parent",
        ),
        (
            f'{{"format": 1, "run_id": "{RUN}", "megatrain": "1", "parent": {{"run_id": "x"}}}}',
            CorruptError,
            "names no parent",
        ),
    ],
)
def test_an_identity_that_cannot_be_read_is_refused_with_a_way_out(
    text: str, kind: type[MegatrainError], message: str, tmp_path: Path
) -> None:
    (tmp_path / "run.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(kind, match=message):
        read_identity(tmp_path)


def test_what_the_disk_refuses_to_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "run.json").mkdir()
    (tmp_path / "attempts.jsonl").mkdir()
    with pytest.raises(StorageError, match=r"run\.json cannot be read"):
        read_identity(tmp_path)
    with pytest.raises(StorageError, match=r"attempts\.jsonl cannot be read"):
        count_attempt(FS, tmp_path, RUN, 0, {})


@given(st.lists(st.integers(0, 9), max_size=6))
def test_an_attempt_is_above_every_earlier_one_and_every_checkpoint(
    tmp_path_factory: pytest.TempPathFactory, seen: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    before: list[int] = []
    for highest in seen:
        attempt = count_attempt(FS, folder, RUN, highest, {"step": 3})
        assert attempt == 1 + max([0, highest, *before])
        before.append(attempt)


def test_lines_of_other_runs_and_cut_lines_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "attempts.jsonl"
    other = json.dumps({"run_id": "b" * 32, "attempt": 9})
    deep = "[" * 100_000
    text = f'{{"run_id": "{RUN}", "attempt": "7"}}'
    path.write_text(f'{other}\nnonsense\n3\n{deep}\n{text}\n{{"run_id": "')
    assert count_attempt(FS, tmp_path, RUN, 0, {"checkpoint": None}) == 1
    *_, last = path.read_text().splitlines()
    assert json.loads(last) == {
        "attempt": 1,
        "run_id": RUN,
        "megatrain": __version__,
        "checkpoint": None,
    }
    assert count_attempt(FS, tmp_path, RUN, 0, {}) == 2


def test_a_start_that_is_killed_while_it_counts_leaves_the_count_right(tmp_path: Path) -> None:
    path = tmp_path / "attempts.jsonl"
    for _ in every_death(lambda fs, _: _start(fs, tmp_path)):
        before = len(path.read_bytes().splitlines()) if path.exists() else 0
        assert count_attempt(FS, tmp_path, RUN, 0, {}) == before + 1
    assert RunIdentity(RUN).parent is None


def _start(fs: FileSystem, run: Path) -> None:
    count_attempt(fs, run, RUN, 0, {})
