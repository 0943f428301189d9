"""One run of a shape that saves, or one that goes on: what `bench_checkpoint.py` measures."""

import gc
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Self, cast

import psutil
import torch
from rich.console import Console

from megatrain_cli.checkpoint.facts import DataFacts, Facts
from megatrain_cli.checkpoint.folder import OpenCheckpoint, open_checkpoint
from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.checkpoint.load import LazyLoader
from megatrain_cli.checkpoint.model_files import model_files
from megatrain_cli.checkpoint.remove import remove_checkpoint
from megatrain_cli.checkpoint.save import Saver, SaveReport, Snapshot
from megatrain_cli.checkpoint.storage import check_storage
from megatrain_cli.checkpoint.write import FileWriter
from megatrain_cli.pipeline.ops import Kind
from megatrain_cli.pipeline.trace import Span
from megatrain_cli.plan.checkpoints import IO_CHUNK_BYTES, IO_CHUNKS
from megatrain_cli.report.console import RunConsole
from megatrain_cli.report.records import StepRecord
from megatrain_cli.store.master import MasterStore
from megatrain_cli.train.assemble import (
    DTYPES,
    Engine,
    assemble,
    first_uses,
    prepare,
    update_order,
)
from megatrain_cli.train.facts import model_facts, run_facts
from megatrain_cli.train.loop import Run
from megatrain_cli.train.position import START, Position
from megatrain_cli.train.rows import TrainingRows
from megatrain_cli.train.warm_up import warm_up
from scripts.bench_run import WARM_UP_STEPS, RandomRows, Variant, check_fits, make_config
from scripts.peaks import forget_host_peak, host_bytes, host_peak_bytes, page_cache_bytes
from scripts.shapes import parse_batch, parse_shape

RESUMED_STEPS = 2
"""Steps that a resumed run makes: after the second, all layers have had an update."""

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


@dataclass(frozen=True)
class SaveFigures:
    """One save while training goes on.

    Attributes:
        step: After which it was begun.
        num_bytes: Of all files.
        seconds: Until the checkpoint was whole on the disk.
        stall_seconds: How long updates were kept waiting, copies included.
        seconds_before, seconds_during, seconds_after: Of a step: medians.
        longest_during: Seconds of the longest step beside the save.
        steps_during: Steps that ran beside it, in part at least.
        extra_host_bytes: Peak resident set while it ran, less what was resident before.
        allowed_host_bytes: The pool, and one chunk a thread.
        page_cache_bytes: By how much the page cache grew at most.
        mode: See `FileWriter.mode`.
    """

    pool_bytes: int
    step: int
    num_bytes: int
    seconds: float
    stall_seconds: float
    seconds_before: float
    seconds_during: float
    longest_during: float
    seconds_after: float
    steps_during: int
    extra_host_bytes: int
    allowed_host_bytes: int
    page_cache_bytes: int
    mode: str


@dataclass(frozen=True)
class Saves:
    """All saves of one run, and the losses of the steps after the last one.

    Attributes:
        checkpoint: Of the last save; it is still there.
        losses: Hexadecimal, from the step after it on.
    """

    figures: tuple[SaveFigures, ...]
    checkpoint: str
    losses: tuple[str, ...]


@dataclass(frozen=True)
class ResumeFigures:
    """One run that goes on; seconds count from the start of the loader.

    Attributes:
        eager: Whether all was loaded before the first step began.
        ready_seconds: From the start of the process to that of the loader: imports and kernels.
        first_seconds: Until the first decoder layer's forward began.
        first_bytes: Read until then.
        least_bytes: Weights of what comes first and of that layer: it cannot begin with fewer.
        loaded_seconds: Until all was there and verified.
        num_bytes: Of it.
        step_seconds: Until the first step's loss was known.
        page_cache_bytes: By how much the page cache grew at most.
        losses: Of the first steps, hexadecimal.
    """

    eager: bool
    ready_seconds: float
    first_seconds: float
    first_bytes: int
    least_bytes: int
    loaded_seconds: float
    num_bytes: int
    step_seconds: float
    page_cache_bytes: int
    losses: tuple[str, ...]


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
class _Step:
    """A step and when it ran."""

    record: StepRecord
    began: float
    ended: float


class _Bench:
    """What both kinds of run are made of: the config, the plan, and kernels that are settled."""

    def __init__(self, job: Job) -> None:
        self.shape, batch = parse_shape(job.shape), parse_batch(job.batch)
        self.variant = Variant(batch, overrides=job.overrides)
        self.folder = Path(job.folder)
        self.console = RunConsole(None if job.verbose else Console(quiet=True))
        self.loaded = make_config(self.folder, self.shape, self.variant, _MOST_STEPS)
        self.skeleton, plan = prepare(self.loaded)
        check_fits(plan)
        config = self.loaded.config
        plan, self.functions = warm_up(
            config, self.skeleton, plan, config.data.max_length, self.console
        )
        check_fits(plan)
        self.console.plan(plan)
        self.plan = plan

    def assemble(self, store: MasterStore | None = None) -> Engine:
        return assemble(self.loaded, self.skeleton, self.plan, self.functions, self.console, store)

    def rows(self) -> RandomRows:
        return RandomRows(self.shape, self.variant, self.plan.decisions, _MOST_STEPS)

    def facts(self) -> Facts:
        """Of a run that has rows of our own making, at its start."""
        rows, config = self.rows(), self.loaded.config
        data = DataFacts(
            rows_xxh3_128="0" * 32,
            num_rows=len(rows.examples),
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


def measure_saves(job: Job) -> Saves:
    """Train, and save once with each pool while training goes on.

    Raises:
        MegatrainError: It does not fit into memory or onto the disk, or a save failed.
    """
    made = _Bench(job)
    checkpoints, fs = made.folder / "run" / "checkpoints", FileSystem()
    storage = check_storage(fs, checkpoints, made.plan.checkpoint_bytes)
    with ExitStack() as stack:
        engine = made.assemble()
        stack.callback(engine.close)
        steps = _timed(Run(made.loaded, engine, made.rows()).steps(), made.console)
        facts, aux = made.facts(), made.aux()
        before = list(islice(steps, job.save_at))[WARM_UP_STEPS:]
        step = WARM_UP_STEPS + len(before)
        figures: list[SaveFigures] = []
        last: SaveReport | None = None
        losses: list[str] = []
        for pool in job.pools:
            if last is not None:
                remove_checkpoint(fs, last.folder)  # one at a time has room
            saver = Saver(
                engine.store,
                checkpoints,
                update_order(engine.plan),
                fs=fs,
                writer=FileWriter(fs),
                pool_bytes=engine.plan.decisions.pool_bytes if pool == "auto" else int(pool),
                threads=IO_CHUNKS,
                atomic_rename=storage.atomic_rename,
            )
            stack.callback(saver.close)
            row = facts.data.rows_per_step * step
            data = facts.data.model_copy(update={"next_row": row})
            snapshot = Snapshot(facts.model_copy(update={"step": step, "data": data}), aux)
            found, last, during = _save(saver, snapshot, steps, before)
            after = list(islice(steps, job.after))
            figures.append(found(after))
            before = after
            losses = [float(one.record.loss).hex() for one in (*during, *after)]
            step += len(losses)
            del saver
            gc.collect()  # its pool
        assert last is not None
        engine.lanes.drain()
        return Saves(tuple(figures), str(last.folder), tuple(losses))


def _save(
    saver: Saver, snapshot: Snapshot, steps: Iterator[_Step], before: Sequence[_Step]
) -> tuple[Callable[[Sequence[_Step]], SaveFigures], SaveReport, list[_Step]]:
    """Save while steps are made; what makes the figures, the report, and those steps."""
    forget_host_peak()
    resident = host_bytes()
    during: list[_Step] = []
    with Sampled(page_cache_bytes, 0.05) as cache:
        began = time.perf_counter()
        assert saver.begin(snapshot)
        reports: list[SaveReport] = []
        while not reports:
            during.append(next(steps))
            reports = saver.poll()
        extra = max(host_peak_bytes(), host_bytes()) - resident
    (report,) = reports
    beside = [one for one in during if one.began < began + report.seconds] or during[:1]

    def figures(after: Sequence[_Step]) -> SaveFigures:
        return SaveFigures(
            pool_bytes=saver.pool.num_bytes,
            step=report.step,
            num_bytes=report.num_bytes,
            seconds=report.seconds,
            stall_seconds=report.stall_seconds,
            seconds_before=_median(before),
            seconds_during=_median(beside),
            longest_during=max(one.record.seconds for one in beside),
            seconds_after=_median(after),
            steps_during=len(beside),
            extra_host_bytes=extra,
            allowed_host_bytes=saver.pool.num_bytes + IO_CHUNKS * IO_CHUNK_BYTES,
            page_cache_bytes=cache.growth,
            mode=report.mode,
        )

    return figures, report, during


def measure_resume(job: Job, checkpoint: Path, *, eager: bool) -> ResumeFigures:
    """Go on from a checkpoint of `measure_saves`, in a process that has done nothing else.

    Raises:
        MegatrainError: It does not fit, or what was saved is not what is read.
    """
    made, fs = _Bench(job), FileSystem()
    _forget_files(checkpoint)
    with ExitStack() as stack:
        saved = stack.enter_context(open_checkpoint(checkpoint, fs))
        store = MasterStore(made.skeleton.layouts, made.plan.decisions.tile_format)
        loader = _loader(made, saved, store, fs)
        ready = time.time() - psutil.Process().create_time()
        cache = stack.enter_context(Sampled(page_cache_bytes, 0.05))
        read = stack.enter_context(Sampled(lambda: loader.num_bytes, 0.002))
        stack.callback(loader.close)
        began = time.perf_counter()
        loader.start()
        engine = made.assemble(store)
        stack.callback(engine.close)
        spans = _keep_spans(engine)
        if eager:
            loader.wait()
        position = Position(saved.manifest.step, saved.manifest.data.next_row)
        run = Run(made.loaded, engine, made.rows(), start=position)
        steps = list(islice(_timed(run.steps(), made.console), RESUMED_STEPS))
        report = loader.wait()
        engine.lanes.drain()
        first = min(
            span.start
            for span in spans
            if span.kind is Kind.FORWARD and span.layer == 1 and span.waits_for is None
        )
        least = [saved.manifest.shards[layer] for layer in first_uses(engine.plan)[:2]]
        return ResumeFigures(
            eager=eager,
            ready_seconds=ready,
            first_seconds=first - began,
            first_bytes=read.at(first),
            least_bytes=sum(shard.weights.bytes for shard in least),
            loaded_seconds=report.seconds,
            num_bytes=report.num_bytes,
            step_seconds=steps[0].ended - began,
            page_cache_bytes=cache.growth,
            losses=tuple(float(one.record.loss).hex() for one in steps),
        )


def _loader(made: _Bench, saved: OpenCheckpoint, store: MasterStore, fs: FileSystem) -> LazyLoader:
    device = torch.device(made.plan.machine.device)

    def lock(layer: int) -> None:
        torch.cuda.set_device(device)  # of this thread
        store.register_layer(layer)

    return LazyLoader(
        saved,
        store,
        threads=IO_CHUNKS,
        fs=fs,
        before_layer=lock if made.plan.decisions.pin_store else None,
        use_order=first_uses(made.plan),
        update_order=update_order(made.plan),
    )


def _forget_files(folder: Path) -> None:
    """Take a checkpoint's files out of the page cache, as they are after a restart."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _keep_spans(engine: Engine) -> list[Span]:
    """A list that has all spans that the run takes from now on."""
    kept: list[Span] = []
    take = engine.executor.take_spans

    def taken() -> list[Span]:
        found = take()
        kept.extend(found)
        return found

    engine.executor.take_spans = taken  # type: ignore[method-assign]
    return kept


def _timed(records: Iterator[StepRecord], console: RunConsole) -> Iterator[_Step]:
    for record in records:
        ended = time.perf_counter()
        console.step(record, _MOST_STEPS)
        yield _Step(record, ended - record.seconds, ended)


def _median(steps: Sequence[_Step]) -> float:
    return statistics.median(one.record.seconds for one in steps)
