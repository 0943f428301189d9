"""A packed run that is killed twice at every step is the run that was never stopped."""

import io
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megatrain_cli.config.load import load_config
from megatrain_cli.pipeline.compute import MicroBatch
from megatrain_cli.pipeline.executor import Executor, IssuedStep
from megatrain_cli.report.console import RunConsole
from megatrain_cli.report.records import StepRecord
from megatrain_cli.train.resume import ResumeRequest
from megatrain_cli.train.session import resume, train
from tests.train.killed import Killed
from tests.train.workspace import make_workspace, one_thread

STEPS, EPOCHS, DOCUMENTS = 15, 3, 20

Tokens = tuple[int, ...]
Packs = tuple[tuple[Tokens, ...], ...]


class Deadly(RunConsole):
    """Dies once a step was computed and not saved, or once it was saved."""

    def __init__(self, computed: int | None = None, saved: int | None = None) -> None:
        super().__init__(Console(file=io.StringIO()))
        self._computed, self._saved = computed, saved

    def step(self, record: StepRecord, total_steps: int) -> None:
        assert total_steps == STEPS
        if record.step == self._computed:
            raise Killed

    def saved(self, path: Path, num_bytes: int, seconds: float, waited: float) -> None:
        del num_bytes, seconds, waited
        if path.name == f"step-{self._saved or 0:08d}":
            raise Killed


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, Packs]]:
    """Of each step that was computed, its rows as documents; a step made again must be the same."""
    found: dict[int, Packs] = {}
    run_step = Executor.run_step

    def spy(self: Executor, batch: Sequence[MicroBatch], host: Any, seed: Any) -> IssuedStep:
        packs = tuple(documents_of(micro) for micro in batch)
        assert found.setdefault(host.step, packs) == packs
        return run_step(self, batch, host, seed)

    monkeypatch.setattr(Executor, "run_step", spy)
    with one_thread():
        yield found


def documents_of(micro: MicroBatch) -> tuple[Tokens, ...]:
    """Of a row; nothing of a row of padding."""
    assert micro.documents is not None
    if (micro.labels == -100).all():
        return ()
    numbers = range(int(micro.documents.max()) + 1)
    return tuple(tuple(micro.input_ids[micro.documents == n].tolist()) for n in numbers)


def make_config(folder: Path) -> Path:
    folder.mkdir()
    return make_workspace(
        folder,
        model={"layers": 1, "hidden": 8, "max_position_embeddings": 100},
        rows=DOCUMENTS,
        data={"packing": True, "shuffle": True, "max_length": 100},
        train={"max_steps": None, "num_epochs": EPOCHS, "micro_batch_size": 2},
        checkpoint={"save_steps": 1, "async_save": False},
    )


def state(run: Path) -> dict[str, bytes]:
    """All tensors of the last checkpoint; the headers before them name run and attempt."""
    folder = run / "checkpoints" / f"step-{STEPS:08d}"
    found = {}
    for path in folder.rglob("*.safetensors"):
        content = path.read_bytes()
        found[path.name] = content[8 + int.from_bytes(content[:8], "little") :]
    assert len(found) > 3
    return found


@pytest.mark.slow
def test_kills_at_every_step_change_nothing(tmp_path: Path, computed: dict[int, Packs]) -> None:
    """RES-04, RES-05, LOOP-06: one run, killed when a step was computed and when it was saved."""
    config = make_config(tmp_path / "unbroken")
    train(load_config(config, []), Deadly())
    expected, whole = state(tmp_path / "unbroken" / "run"), dict(computed)
    ledger = [document for step in range(1, STEPS + 1) for row in whole[step] for document in row]
    assert len(ledger) == EPOCHS * DOCUMENTS
    for epoch in range(EPOCHS):
        counts = Counter(ledger[epoch * DOCUMENTS : (epoch + 1) * DOCUMENTS])
        assert set(counts.values()) == {1}
        assert len(counts) == DOCUMENTS
    run = tmp_path / "killed"
    with pytest.raises(Killed):
        train(load_config(config, [f"train.output_dir={run}"]), Deadly(saved=1))
    for step in range(2, STEPS + 1):
        with pytest.raises(Killed):
            resume(ResumeRequest(run), Deadly(computed=step))
        with nullcontext() if step == STEPS else pytest.raises(Killed):
            resume(ResumeRequest(run), Deadly(saved=step if step < STEPS else None))
    assert state(run) == expected
    assert computed == whole
