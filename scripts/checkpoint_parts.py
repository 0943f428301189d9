"""A run of a shape whose checkpoints are measured: its parts, its steps, and samples beside it."""

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, cast

from rich.console import Console

from megatrain_cli.checkpoint.facts import DataFacts, Facts
from megatrain_cli.checkpoint.model_files import model_files
from megatrain_cli.report.console import RunConsole
from megatrain_cli.report.records import StepRecord
from megatrain_cli.store.master import MasterStore
from megatrain_cli.train.assemble import (
    DTYPES,
    Engine,
    assemble,
    prepare,
)
from megatrain_cli.train.facts import model_facts, run_facts
from megatrain_cli.train.position import START, Position
from megatrain_cli.train.preparation import refuse_what_does_not_fit
from megatrain_cli.train.rows import TrainingRows
from megatrain_cli.train.warm_up import warm_up
from scripts.bench_run import RandomRows, Variant, make_config
from scripts.shapes import parse_batch, parse_shape

_MOST_STEPS = 10_000  # of a run; it ends when all is measured


@dataclass(frozen=True)
class Job:
    """What to measure, as it goes from process to process.

    Attributes:
        folder: For the model's config and one checkpoint.
        pools: Of one save each: bytes, or `auto`.
        save_at: Steps before the first save.
        after: Steps after each.
    """

    shape: str
    batch: str
    folder: str
    pools: tuple[str, ...] = ("auto",)
    save_at: int = 6
    after: int = 6
    overrides: tuple[str, ...] = ()
    verbose: bool = False


class Sampled:
    """In its block, a number is read again and again.

    Args:
        read: The number.
        interval: Seconds.

    Attributes:
        points: When, in seconds of `time.perf_counter`, and what; the first is before the block.
    """

    def __init__(self, read: Callable[[], int], interval: float) -> None:
        self._read, self._interval, self._ended = read, interval, threading.Event()
        self.points = [(time.perf_counter(), read())]
        self._thread = threading.Thread(target=self._work, daemon=True)

    @property
    def growth(self) -> int:
        """From the first to the largest."""
        return max(value for _, value in self.points) - self.points[0][1]

    def at(self, when: float) -> int:
        """What it was last, not after that time."""
        return next(value for at, value in reversed(self.points) if at <= when)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._ended.wait(self._interval):
            self.points.append((time.perf_counter(), self._read()))


@dataclass(frozen=True)
class TimedStep:
    """A step and when it ran."""

    record: StepRecord
    began: float
    ended: float


class CheckpointBench:
    """What both kinds of run are made of: the config, the plan, and kernels that are settled."""

    def __init__(self, job: Job) -> None:
        self.shape, batch = parse_shape(job.shape), parse_batch(job.batch)
        # The plan has a pool only for a run that will save.
        saves = f"checkpoint.save_steps={job.save_at}"
        self.variant = Variant(batch, overrides=(saves, *job.overrides))
        self.folder = Path(job.folder)
        self.console = RunConsole(None if job.verbose else Console(quiet=True))
        self.loaded = make_config(self.folder, self.shape, self.variant, _MOST_STEPS)
        self.skeleton, plan = prepare(self.loaded)
        refuse_what_does_not_fit(plan)
        config = self.loaded.config
        plan, self.functions = warm_up(
            config, self.skeleton, plan, config.data.max_length, self.console
        )
        refuse_what_does_not_fit(plan)
        self.console.plan(plan)
        self.plan = plan

    def assemble(self, store: MasterStore | None = None) -> Engine:
        """The engine, over a store that is being loaded if one is given."""
        return assemble(self.loaded, self.skeleton, self.plan, self.functions, self.console, store)

    def rows(self) -> RandomRows:
        """More than any run takes."""
        return RandomRows(self.shape, self.variant, self.plan.decisions, _MOST_STEPS)

    def facts(self) -> Facts:
        """Of a run that has rows of our own making, at its start."""
        rows, config = self.rows(), self.loaded.config
        data = DataFacts(
            rows_xxh3_128="0" * 32,
            num_rows=rows.rows_per_epoch,
            sources=(),
            order="random tokens",
            seed=config.train.seed,
            shuffle=False,
            next_row=0,
            rows_per_step=rows.rows_per_step,
        )
        model = model_facts(self.skeleton, self._model_file("config.json"))
        placed = cast("TrainingRows", _Placed(rows.total_steps))
        return run_facts(
            config,
            self.skeleton,
            self.plan,
            placed,
            data=data,
            model=model,
            run_id="0" * 32,
            attempt=1,
        ).start

    def aux(self) -> dict[str, bytes]:
        """Files that go into a checkpoint beside its shards."""
        config = self.loaded.config
        return {
            **model_files(Path(config.model.path), DTYPES[config.model.dtype]),
            "training/config.yaml": b"{}\n",  # only the program's own `resume` reads it
        }

    def _model_file(self, name: str) -> bytes:
        return (Path(self.loaded.config.model.path) / name).read_bytes()


@dataclass(frozen=True)
class _Placed:
    """What facts ask rows for."""

    total_steps: int
    start: Position = START


def timed(records: Iterator[StepRecord], console: RunConsole) -> Iterator[TimedStep]:
    """Steps with the times at which they ran; each is shown."""
    for record in records:
        ended = time.perf_counter()
        console.step(record, _MOST_STEPS)
        yield TimedStep(record, ended - record.seconds, ended)


def median_seconds(steps: Sequence[TimedStep]) -> float:
    """Of a step, in the middle of them."""
    return statistics.median(one.record.seconds for one in steps)
