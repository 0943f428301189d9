"""Saves beside training: what they take, and what they cost the steps."""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice

from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.checkpoint.remove import remove_checkpoint
from megatrain_cli.checkpoint.save import Saver, SaveReport, Snapshot
from megatrain_cli.checkpoint.storage import check_storage
from megatrain_cli.checkpoint.write import FileWriter
from megatrain_cli.plan.checkpoints import IO_CHUNK_BYTES, IO_CHUNKS
from megatrain_cli.train.assemble import (
    update_order,
)
from megatrain_cli.train.loop import Run
from scripts.bench_run import WARM_UP_STEPS
from scripts.checkpoint_parts import CheckpointBench, Job, Sampled, TimedStep, median_seconds, timed
from scripts.peaks import forget_host_peak, host_bytes, host_peak_bytes, page_cache_bytes


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


def measure_saves(job: Job) -> Saves:
    """Train, and save once with each pool while training goes on.

    Raises:
        MegatrainError: It does not fit into memory or onto the disk, or a save failed.
    """
    made = CheckpointBench(job)
    checkpoints, fs = made.folder / "run" / "checkpoints", FileSystem()
    storage = check_storage(fs, checkpoints, made.plan.checkpoint_bytes)
    with ExitStack() as stack:
        engine = made.assemble()
        stack.callback(engine.close)
        steps = timed(Run(made.loaded, engine, made.rows()).steps(), made.console)
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
    saver: Saver, snapshot: Snapshot, steps: Iterator[TimedStep], before: Sequence[TimedStep]
) -> tuple[Callable[[Sequence[TimedStep]], SaveFigures], SaveReport, list[TimedStep]]:
    """Save while steps are made; what makes the figures, the report, and those steps."""
    forget_host_peak()
    resident = host_bytes()
    during: list[TimedStep] = []
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

    def figures(after: Sequence[TimedStep]) -> SaveFigures:
        return SaveFigures(
            pool_bytes=saver.pool.num_bytes,
            step=report.step,
            num_bytes=report.num_bytes,
            seconds=report.seconds,
            stall_seconds=report.stall_seconds,
            seconds_before=median_seconds(before),
            seconds_during=median_seconds(beside),
            longest_during=max(one.record.seconds for one in beside),
            seconds_after=median_seconds(after),
            steps_during=len(beside),
            extra_host_bytes=extra,
            allowed_host_bytes=saver.pool.num_bytes + IO_CHUNKS * IO_CHUNK_BYTES,
            page_cache_bytes=cache.growth,
            mode=report.mode,
        )

    return figures, report, during
