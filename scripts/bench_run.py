"""Runs of one shape, one after the other, over one store: what `bench_step.py` measures."""

import gc
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console

from megatrain_cli.config.load import LoadedConfig, load_config
from megatrain_cli.errors import MegatrainError
from megatrain_cli.model.layout import LayerLayout
from megatrain_cli.model.spec import ModelSpec
from megatrain_cli.pipeline.compute import MicroBatch
from megatrain_cli.plan.decide import Decisions
from megatrain_cli.plan.plan import RunPlan, make_plan
from megatrain_cli.probe.peaks import gpu_peak_bytes
from megatrain_cli.report.console import RunConsole
from megatrain_cli.report.records import StepRecord
from megatrain_cli.store.master import MasterStore
from megatrain_cli.train.assemble import Engine, assemble, prepare
from megatrain_cli.train.forecast import forecast
from megatrain_cli.train.layout import StepRows
from megatrain_cli.train.loop import Run
from megatrain_cli.train.preparation import refuse_what_does_not_fit
from megatrain_cli.train.warm_up import warm_up
from scripts.link_use import link_use
from scripts.peaks import forget_peaks, host_bytes, host_peak_bytes
from scripts.shapes import Batch, Shape, make_documents, make_tokens, tflops, write_model

WARM_UP_STEPS = 2


@dataclass(frozen=True)
class Variant:
    """One run of a shape.

    Attributes:
        accumulation: Micro-batches that the batch is cut into.
        packed: Tokens of a document, about; None for one document a row.
        overrides: Of the config, as `key=value`.
    """

    batch: Batch
    accumulation: int = 1
    packed: int | None = None
    overrides: tuple[str, ...] = ()

    def __str__(self) -> str:
        """What differs from a plain run."""
        cut = f" in {self.accumulation}" if self.accumulation > 1 else ""
        packed = f", documents of {self.packed}" if self.packed else ""
        return ", ".join([f"{self.batch}{cut}{packed}", *self.overrides])


@dataclass(frozen=True)
class Figures:
    """What one variant measured: medians over the timed steps.

    Attributes:
        first: Whether this process had run nothing before. What compiling leaves behind stays in
            it, so only then is the host's peak that of the plan.
        fresh: Whether the store was made for this run.
        first_loss: Of random weights, if `fresh`; otherwise of what the runs before left.
        tokens_per_second: Supervised ones.
        link_in_use, link_out_use: See `link_use`; None where the link was not measured.
        host_step_bytes: The largest resident set after a step; `host_peak_bytes` also counts the
            time before the first.
        bytes_per_parameter: Of the host's peak.
        planned_seconds: What the forecast says of a step; None on a machine that was not measured
            (`megatrain probe`), as the floor.
        floor_seconds: No step of this plan is shorter on this machine, as far as it was measured;
            `floor_part` is what it is made of.
        wall_seconds: Of everything, from the config to the last step.
    """

    parameters: int
    first: bool
    fresh: bool
    first_loss: float
    seconds: float
    planned_seconds: float | None
    tokens_per_second: float
    tflops: float
    kept_layers: int
    link_in_use: float | None
    link_out_use: float | None
    gpu_peak_bytes: int
    gpu_planned_bytes: int
    host_peak_bytes: int
    host_step_bytes: int
    host_planned_bytes: int
    bytes_per_parameter: float
    floor_seconds: float | None
    floor_part: str | None
    phases: dict[str, float]
    breakdown: dict[str, float]
    wall_seconds: float


@dataclass(frozen=True)
class Result:
    """One run: its figures, or the reason why there are none."""

    shape: str
    variant: str
    figures: Figures | None
    reason: str = ""


@dataclass(frozen=True)
class RandomRows:
    """Rows of random tokens in exactly the shape of the batch, all of them learned."""

    shape: Shape
    variant: Variant
    decisions: Decisions
    total_steps: int

    @property
    def rows_per_step(self) -> int:
        """Rows of every step."""
        return self.variant.batch.rows

    @property
    def rows_per_epoch(self) -> int:
        """As many as the run takes: one epoch."""
        return self.rows_per_step * self.total_steps

    def of_step(self, index: int) -> StepRows:
        """The rows of a step, cut as the plan has it."""
        batch, packed = self.variant.batch, self.variant.packed
        tokens = make_tokens(self.shape, batch, index)
        documents = None if packed is None else make_documents(batch, packed, index)
        micro_batches = []
        for start in range(0, batch.rows, self.decisions.micro_batch_size):
            own = slice(start, start + self.decisions.micro_batch_size)
            numbers = None if documents is None else documents[own]
            micro_batches.append(MicroBatch(tokens[own], tokens[own], numbers))
        return StepRows(micro_batches, batch.rows)


class Bench:
    """Runs of one shape, one after the other, over one store where that is possible.

    Args:
        shape: The model.
        steps: Of each run.
        first: Whether this process has run nothing yet.
        verbose: Show plans and steps.
    """

    def __init__(
        self, shape: Shape, steps: int, *, first: bool = True, verbose: bool = False
    ) -> None:
        self._shape, self._steps, self._first = shape, steps, first
        self._console = RunConsole(None if verbose else Console(quiet=True))
        self._store: MasterStore | None = None

    def run(self, variant: Variant) -> Figures:
        """Train for a few steps.

        Raises:
            MegatrainError: It does not fit, or what the config asks for cannot be had.
            torch.OutOfMemoryError: The plan was wrong about the GPU.
        """
        began = time.perf_counter()
        first, self._first = self._first, False
        gc.collect()  # what the run before left on the device, a failed one above all
        forget_peaks()
        if torch.cuda.is_available():
            torch.compiler.reset()  # or shape upon shape would reach dynamo's limit of 8 a function
        with tempfile.TemporaryDirectory(prefix="megatrain-bench-") as folder:
            loaded = make_config(Path(folder), self._shape, variant, self._steps)
            before = self._store
            with self._engine(loaded) as (engine, spec):
                rows = RandomRows(self._shape, variant, engine.plan.decisions, self._steps)
                records, resident = [], 0
                for record in Run(loaded, engine, rows).steps():
                    self._console.step(record, self._steps)
                    records.append(record)
                    resident = max(resident, host_bytes())
                engine.lanes.drain()
                plan, gpu_peak = engine.plan, gpu_peak_bytes()
                expected = forecast(plan, spec, self._steps)
        timed = records[min(WARM_UP_STEPS, len(records) - 1) :]
        seconds = statistics.median(record.seconds for record in timed)
        # The kernel counts both a little late, each by itself (proc(5)).
        host_peak = max(host_peak_bytes(), resident)
        bounds, rates = plan.bounds, plan.machine.rates
        uses = [link_use(r.breakdown, rates.link) for r in timed] if rates and rates.link else []
        return Figures(
            parameters=self._shape.parameters,
            first=first,
            fresh=self._store is not before,
            first_loss=records[0].loss,
            seconds=seconds,
            planned_seconds=None if expected is None else expected.step_seconds,
            tokens_per_second=records[-1].tokens / seconds,
            tflops=tflops(self._shape, variant.batch, seconds),
            kept_layers=plan.decisions.keep_layers,
            link_in_use=statistics.median(use[0] for use in uses) if uses else None,
            link_out_use=statistics.median(use[1] for use in uses) if uses else None,
            gpu_peak_bytes=gpu_peak,
            gpu_planned_bytes=plan.device_bytes,
            host_peak_bytes=host_peak,
            host_step_bytes=resident,
            host_planned_bytes=plan.host_bytes,
            bytes_per_parameter=host_peak / self._shape.parameters,
            floor_seconds=None if bounds is None else bounds.floor,
            floor_part=None if bounds is None else bounds.binds,
            phases=_medians(timed, "phases"),
            breakdown=_medians(timed, "breakdown"),
            wall_seconds=time.perf_counter() - began,
        )

    def close(self) -> None:
        """Let go of the store, and of the terminal."""
        self._console.close()
        self._drop_store()

    def _drop_store(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()

    @contextmanager
    def _engine(self, loaded: LoadedConfig) -> Iterator[tuple[Engine, ModelSpec]]:
        """An engine and its model; over the store of the run before, if that serves this run."""
        config = loaded.config
        skeleton, plan = prepare(loaded)
        if self._store is not None and not _serves(self._store, plan, skeleton.layouts):
            self._drop_store()
            skeleton, plan = prepare(loaded)  # with the memory that is free now
        if self._store is not None:
            # The machine was looked at beside a store that the plan bills as one to come.
            unbilled = plan.machine.host_bytes + self._store.num_bytes
            machine = replace(plan.machine, host_bytes=unbilled)
            plan = make_plan(config, skeleton.spec, skeleton.layouts, machine, plan.known)
        refuse_what_does_not_fit(plan)
        plan, functions = warm_up(config, skeleton, plan, config.data.max_length, self._console)
        refuse_what_does_not_fit(plan)
        self._console.plan(plan)
        engine = assemble(loaded, skeleton, plan, functions, self._console, self._store)
        try:
            yield engine, skeleton.spec
        finally:
            self._store = engine.leave_store()


def make_config(folder: Path, shape: Shape, variant: Variant, steps: int) -> LoadedConfig:
    """The config of a run on rows of our own making; its model's folder is written to `folder`."""
    write_model(folder / "model", shape)
    config = {
        "model": {"path": "model", "init": "random"},
        "data": {
            "train": "never-read.jsonl",
            "max_length": variant.batch.length,
        },
        "train": {
            "output_dir": "never-written",
            "max_steps": steps,
            "micro_batch_size": variant.batch.rows // variant.accumulation,
            "gradient_accumulation_steps": variant.accumulation,
        },
    }
    (folder / "config.yaml").write_text(json.dumps(config))
    loaded = load_config(folder / "config.yaml", variant.overrides)
    if variant.packed is None:
        return loaded
    # Rows of our own making are packed; the config's own packing is another matter.
    data = loaded.config.data.model_copy(update={"packing": True})
    return replace(loaded, config=loaded.config.model_copy(update={"data": data}))


def _serves(store: MasterStore, plan: RunPlan, layouts: tuple[LayerLayout, ...]) -> bool:
    same = [tile.layout for tile in store.tiles] == list(layouts)
    same &= store.format == plan.decisions.tile_format
    return same and bool(store.locked_bytes) == plan.decisions.pin_store


def _medians(timed: Sequence[StepRecord], table: str) -> dict[str, float]:
    """A table of the records; each figure is a median by itself, so they need not add up."""
    found = [getattr(record, table) for record in timed]
    return {key: statistics.median(values[key] for values in found) for key in found[0]}


def bench(
    shape: Shape,
    variants: Sequence[Variant],
    steps: int,
    *,
    first: bool = True,
    verbose: bool = False,
) -> Iterator[Result]:
    """Run variants of one shape; one that fails does not keep the others from running."""
    runs = Bench(shape, steps, first=first, verbose=verbose)
    try:
        for variant in variants:
            figures, reason = None, ""
            try:
                figures = runs.run(variant)
            except (MegatrainError, torch.OutOfMemoryError) as error:
                reason = " ".join(str(error).split())[:300]
            yield Result(shape.name, str(variant), figures, reason)
    finally:
        runs.close()
