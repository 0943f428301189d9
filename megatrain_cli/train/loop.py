"""A run from its config to its weights on disk; one optimizer step fits on one screen."""

import hashlib
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from megatrain_cli.checkpoint.model_folder import check_room, save_model_folder
from megatrain_cli.config.load import LoadedConfig, dump_config
from megatrain_cli.errors import DeviceError, NumericsError, PlanError, Stopped
from megatrain_cli.optim.adamw import AdamStep
from megatrain_cli.optim.lr import learning_rate
from megatrain_cli.pipeline.breakdown import breakdown
from megatrain_cli.pipeline.executor import IssuedStep
from megatrain_cli.report.console import RunConsole
from megatrain_cli.report.journal import Journal
from megatrain_cli.report.records import StepRecord
from megatrain_cli.train.assemble import DTYPES, Engine, assemble, check_examples, prepare
from megatrain_cli.train.folder import RunFolder
from megatrain_cli.train.rows import RowSource, StepRows, TrainingRows, load_rows
from megatrain_cli.train.step import StepUpdate
from megatrain_cli.train.stop import StopRequest
from megatrain_cli.train.warm_up import warm_up

# Share of padding beyond which a compiled run says so: each token then costs more than twice.
NOTED_PADDING = 0.5


def train(loaded: LoadedConfig, console: RunConsole) -> None:
    """Train, and write the weights at the end.

    Raises:
        Stopped: A signal asked for it; the step was finished and the weights were written.
        NumericsError: A loss or gradient was not finite; the last good weights were written.
    """
    config = loaded.config
    with ExitStack() as stack:
        folder = stack.enter_context(RunFolder(Path(config.train.output_dir)))
        skeleton, plan = prepare(loaded)
        if plan.shortfalls:  # before any data is read
            raise PlanError("\n".join(plan.shortfalls))
        rows = load_rows(config, plan.decisions)
        check_examples(rows.examples, skeleton, Path(config.model.path))
        _show_rows(rows, console)
        with _device_errors(config.train.micro_batch_size):
            plan, functions = warm_up(config, skeleton, plan, rows.longest, console)
        rows = rows.planned(plan.decisions)
        if plan.shortfalls:  # measured, it may need more than it seemed
            raise PlanError("\n".join(plan.shortfalls))
        console.plan(plan)
        if plan.decisions.compiled and rows.padding > NOTED_PADDING:
            console.note(
                f"{rows.padding:.0%} of the layers' work is on padding: compiled rows all have "
                f"the length of the longest, {plan.decisions.max_length} tokens. A lower "
                "`data.max_length`, or `pipeline.compile: false`, may be faster."
            )
        width = DTYPES[config.model.dtype].itemsize
        check_room(folder.path, skeleton.spec.num_parameters * width)
        with _device_errors(plan.decisions.micro_batch_size):
            engine = assemble(loaded, skeleton, plan, functions, console)
        stack.callback(engine.close)
        folder.write_config(dump_config(config))
        journal = stack.enter_context(Journal(folder.metrics))
        run = Run(loaded, engine, rows)
        stop = stack.enter_context(StopRequest())
        done = 0
        try:
            with _device_errors(plan.decisions.micro_batch_size):
                for done, record in enumerate(run.steps(), start=1):
                    journal.write(record)
                    if done % config.logging.log_steps == 0 or done == rows.total_steps:
                        console.step(record, rows.total_steps)
                    if stop.signal_name is not None:
                        break
                engine.lanes.drain()
        except NumericsError as refused:
            if done and run.whole:
                try:
                    _save(engine, folder, done, Path(config.model.path), console)
                except NumericsError as not_written:
                    raise NumericsError(f"{refused} {not_written}") from refused
            raise
        _save(engine, folder, done, Path(config.model.path), console)
        if done < rows.total_steps:
            raise Stopped(
                f"Stopped by {stop.signal_name} after step {done} of {rows.total_steps}; the "
                f"weights are in {folder.checkpoint(done)}."
            )


class Run:
    """One run's steps, each a pure function of the step's number and the store."""

    def __init__(self, loaded: LoadedConfig, engine: Engine, rows: RowSource) -> None:
        self._config, self._engine, self._rows = loaded.config, engine, rows
        self._current: StepUpdate | None = None

    @property
    def whole(self) -> bool:
        """Whether all layers have had the same number of updates."""
        return self._current is None or self._current.untouched

    def steps(self) -> Iterator[StepRecord]:
        """Run step after step; yields as soon as a step's loss and norm are known.

        Deferred updates of a yielded step are still running then, and the next step's forward
        starts behind them, layer by layer.
        """
        for index in range(self._rows.total_steps):
            began = time.perf_counter()
            rows = self._rows.of_step(index)
            loaded = time.perf_counter()
            update = self._current = self._update(index)
            seed = None
            if self._engine.skeleton.spec.has_dropout:
                seed = partial(dropout_seed, self._config.train.seed, index)
            with self._engine.functions.no_recompile():
                issued = self._engine.executor.run_step(rows.micro_batches, update, seed)
            issued.clipped.wait()
            ended = time.perf_counter()
            yield self._record(index, rows, update, issued, began, loaded, ended)

    def _update(self, index: int) -> StepUpdate:
        optimizer, train = self._config.optimizer, self._config.train
        return StepUpdate(
            step=index + 1,
            base=AdamStep(
                step=index + 1,
                lr=self._learning_rate(index),
                beta1=optimizer.betas[0],
                beta2=optimizer.betas[1],
                eps=optimizer.eps,
                weight_decay=optimizer.weight_decay,
                seed=train.seed,
            ),
            max_grad_norm=optimizer.max_grad_norm,
            eager=self._engine.plan.decisions.eager,
            spec=self._engine.skeleton.spec,
            store=self._engine.store,
            updater=self._engine.updater,
        )

    def _learning_rate(self, index: int) -> float:
        schedule, total = self._config.schedule, self._rows.total_steps
        warmup = schedule.warmup_steps
        if schedule.warmup_ratio is not None:
            warmup = round(schedule.warmup_ratio * total)
        return learning_rate(
            index,
            peak=self._config.optimizer.learning_rate,
            schedule=schedule.type,
            warmup_steps=warmup,
            total_steps=total,
            min_lr_ratio=schedule.floor,
        )

    def _record(
        self,
        index: int,
        rows: StepRows,
        update: StepUpdate,
        issued: IssuedStep,
        began: float,
        loaded: float,
        ended: float,
    ) -> StepRecord:
        parts = breakdown(self._engine.executor.take_spans(), began, ended)
        rows_so_far = index * self._rows.rows_per_step + rows.num_rows
        return StepRecord(
            step=index + 1,
            loss=update.loss,
            learning_rate=self._learning_rate(index),
            grad_norm=update.grad_norm,
            tokens=issued.num_targets,
            tokens_per_second=issued.num_targets / (ended - began),
            seconds=ended - began,
            phases={
                "data": loaded - began,
                "forward": issued.loss.seconds_since(issued.start),
                "backward": issued.end.seconds_since(issued.loss),
                "update": parts.update_seconds,
            },
            epoch=rows_so_far / len(self._rows.examples),
            rows=rows.num_rows,
            breakdown=asdict(parts),
        )


def dropout_seed(seed: int, step: int, layer: int, micro_batch: int) -> int:
    """63 bits that differ for every argument: recompute draws the masks of forward again."""
    key = f"{seed}:{step}:{layer}:{micro_batch}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) >> 1


def _save(engine: Engine, folder: RunFolder, step: int, source: Path, console: RunConsole) -> None:
    target = folder.checkpoint(step)
    console.saved(target, save_model_folder(engine.store, source, target))


def _show_rows(rows: TrainingRows, console: RunConsole) -> None:
    for line in rows.summary.lines():
        console.note(line)
    shown = "".join(f"[{text}]" if trained else text for text, trained in rows.example)
    console.note(f"first row, [trained] in brackets: {shown[:600]}")


@contextmanager
def _device_errors(num_rows: int) -> Iterator[None]:
    """Turn the device's failures into one clear line.

    Args:
        num_rows: That pass through a layer at once.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DeviceError(
            f"The GPU ran out of memory with {num_rows} rows in a layer at once: "
            f"{str(error).splitlines()[0]} Set `pipeline.activations: recompute`, or a smaller "
            "`train.micro_batch_size`."
        ) from error
