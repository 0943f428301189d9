"""A run that goes on from a checkpoint: how soon it computes, and how soon all is there."""

import os
import time
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import psutil
import torch

from megatrain_cli.checkpoint.folder import OpenCheckpoint, open_checkpoint
from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.checkpoint.load import LazyLoader
from megatrain_cli.pipeline.ops import Kind
from megatrain_cli.pipeline.trace import Span
from megatrain_cli.plan.checkpoints import IO_CHUNKS
from megatrain_cli.store.master import MasterStore
from megatrain_cli.train.assemble import (
    Engine,
    first_uses,
    update_order,
)
from megatrain_cli.train.loop import Run
from megatrain_cli.train.position import Position
from scripts.checkpoint_parts import CheckpointBench, Job, Sampled, timed
from scripts.peaks import page_cache_bytes

RESUMED_STEPS = 2
"""Steps that a resumed run makes: after the second, all layers have had an update."""


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


def measure_resume(job: Job, checkpoint: Path, *, eager: bool) -> ResumeFigures:
    """Go on from a checkpoint of `measure_saves`, in a process that has done nothing else.

    Raises:
        MegatrainError: It does not fit, or what was saved is not what is read.
    """
    made, fs = CheckpointBench(job), FileSystem()
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
        before = loader.num_bytes  # the samples may be some milliseconds old
        position = Position(saved.manifest.step, saved.manifest.data.next_row)
        run = Run(made.loaded, engine, made.rows(), start=position)
        steps = list(islice(timed(run.steps(), made.console), RESUMED_STEPS))
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
            first_bytes=max(before, read.at(first)),
            least_bytes=sum(shard.weights.bytes for shard in least),
            loaded_seconds=report.seconds,
            num_bytes=report.num_bytes,
            step_seconds=steps[0].ended - began,
            page_cache_bytes=cache.growth,
            losses=tuple(float(one.record.loss).hex() for one in steps),
        )


def _loader(
    made: CheckpointBench, saved: OpenCheckpoint, store: MasterStore, fs: FileSystem
) -> LazyLoader:
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
