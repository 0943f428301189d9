"""Whole runs in this process: what they said, and things that happen in the middle of them."""

import io
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.config.load import load_config
from megatrain_cli.pipeline.executor import Executor
from megatrain_cli.pipeline.lanes import Pending, Work
from megatrain_cli.pipeline.ops import Kind, Op
from megatrain_cli.report.console import RunConsole
from megatrain_cli.train.resume import ResumeRequest
from megatrain_cli.train.session import resume, train
from tests.checkpoint.tiles import payloads
from tests.train.workspace import make_workspace, one_thread


class Said:
    """A console for a run, and what was said to it."""

    def __init__(self) -> None:
        self._file = io.StringIO()
        self.console = RunConsole(Console(file=self._file, width=10_000))

    @property
    def text(self) -> str:
        return self._file.getvalue()


def train_here(config: Path, *overrides: str, said: Said | None = None) -> str:
    said = said or Said()
    with said.console, one_thread():
        train(load_config(config, overrides), said.console)
    return said.text


def saves_each_step(folder: Path) -> Path:
    """A config of 4 steps that waits for each save, and in `whole` its undisturbed run."""
    checkpoint = {"save_steps": 1, "async_save": False, "keep_last": 9}
    config = make_workspace(
        folder, train={"max_steps": 4}, model={"layers": 2}, checkpoint=checkpoint
    )
    train_here(config, f"train.output_dir={folder / 'whole'}")
    return config


def resume_here(
    run: Path,
    *overrides: str,
    steps: int | None = None,
    rewind: bool = False,
    force: bool = False,
    said: Said | None = None,
) -> str:
    said = said or Said()
    asked = ResumeRequest(run, tuple(overrides), steps=steps, rewind=rewind, force=force)
    with said.console, one_thread():
        resume(asked, said.console)
    return said.text


def last_payloads(run: Path) -> dict[str, bytes]:
    """The tensors of the last checkpoint, to be compared bit by bit."""
    return payloads(max(run.glob("checkpoints/step-*")))


class Moments:
    """Calls what a test wants in chosen ops; steps are counted from 1 in every run."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._acts: dict[tuple[int, Kind], Callable[[], None]] = {}
        self._step = 0
        run = Executor._run

        def act_and_run(executor: Executor, op: Op, work: Work) -> Pending | None:
            if op.kind is Kind.FORWARD and op.layer == 0 and op.micro_batch == 0:
                self._step += 1
            act = self._acts.pop((self._step, op.kind), None)
            if act is not None:
                with executor._place(op):
                    act()
            return run(executor, op, work)

        patch.setattr(Executor, "_run", act_and_run)

    def at(self, step: int, kind: Kind, act: Callable[[], None]) -> None:
        """Do something in the first op of a kind in a step."""
        self._acts[step, kind] = act


@contextmanager
def disk_waits(patch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """No save writes anything before the second event; the first: one waits."""
    waits, go = threading.Event(), threading.Event()
    make_folder = FileSystem.make_folder

    def wait(fs: FileSystem, path: Path) -> None:
        if path.name.startswith(".tmp-step-"):
            waits.set()
            assert go.wait(60)
        make_folder(fs, path)

    patch.setattr(FileSystem, "make_folder", wait)
    try:
        yield waits, go
    finally:
        go.set()
