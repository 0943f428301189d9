"""Step after step; one optimizer step fits on one screen."""

import hashlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict
from functools import partial

from megatrain_cli.config.load import LoadedConfig
from megatrain_cli.optim.adamw import AdamStep
from megatrain_cli.optim.lr import learning_rate, warmup_steps_of
from megatrain_cli.pipeline.breakdown import breakdown
from megatrain_cli.pipeline.executor import IssuedStep, Score
from megatrain_cli.pipeline.lanes import InlineLanes
from megatrain_cli.report.records import EvalRecord, StepRecord, perplexity
from megatrain_cli.train.assemble import Engine
from megatrain_cli.train.eval_rows import EvaluationRows
from megatrain_cli.train.layout import StepRows
from megatrain_cli.train.position import START, Position
from megatrain_cli.train.prefetch import Prefetch
from megatrain_cli.train.rows import RowSource
from megatrain_cli.train.step import StepUpdate, UpdateStop


class Run:
    """One run's steps, each a pure function of the step's number and the store.

    Args:
        loaded: The config in force.
        engine: What computes.
        rows: What it learns from.
        start: Where this process goes on.
        stop: May leave the rest of an update undone; the run ends with that step then.
    """

    def __init__(
        self,
        loaded: LoadedConfig,
        engine: Engine,
        rows: RowSource,
        *,
        start: Position = START,
        stop: UpdateStop | None = None,
    ) -> None:
        self._config, self._engine, self._rows = loaded.config, engine, rows
        self._start, self._stop = start, stop or UpdateStop()
        self._last: StepUpdate | None = None
        self._before: StepUpdate | None = None

    @property
    def landed(self) -> StepUpdate | None:
        """The last step whose gradients have all landed; None before the first.

        What is left of its update could be made later from what the tiles hold.
        """
        if self._last is not None and self._last.can_be_finished:
            return self._last
        return self._before

    @property
    def left(self) -> StepUpdate | None:
        """The step whose update was left undone; None where none was."""
        return self.landed if self._stop.at is not None else None

    def steps(self) -> Iterator[StepRecord]:
        """Run step after step; yields as soon as a step's loss and norm are known.

        Its updates may be running then, and the next step's forward starts behind them, layer by
        layer.
        """
        with closing(Prefetch(self._rows)) as prefetch:
            for index in range(self._start.step, self._rows.total_steps):
                record = self._step(index, prefetch)
                if record is None:
                    return
                yield record

    def _step(self, index: int, prefetch: Prefetch) -> StepRecord | None:
        """One step; None if it was computed from weights that were left half updated."""
        began = time.perf_counter()
        rows = prefetch.of_step(index)
        before, update = self.landed, self._update(index)
        self._before, self._last = before, update
        seed = None
        if self._engine.skeleton.spec.has_dropout:
            seed = partial(dropout_seed, self._config.train.seed, index)
        with self._engine.functions.no_recompile():
            issued = self._engine.executor.run_step(rows.micro_batches, update, seed)
        issued.clipped.wait()
        if self._stop.at is not None and self._stop.at <= index:
            return None
        update.landed = True
        times = (began, time.perf_counter(), prefetch.waited_seconds)
        return self._record(index, rows, update, issued, times)

    def evaluate(
        self, rows: EvaluationRows, step: int, stopped: Callable[[], bool] = lambda: False
    ) -> EvalRecord | None:
        """Mean loss over all rows, with the weights as they are after `step` steps.

        Without dropout, and without a trace: the steps after it are the same to the last bit.

        Args:
            rows: What to evaluate on.
            step: Steps completed.
            stopped: Asked between passes whether to give up.

        Returns:
            None if it was given up, or if an update that it waited for was.
        """
        began = time.perf_counter()
        scores: list[Score] = []
        engine = self._engine
        with (
            closing(Prefetch(rows)) as prefetch,
            engine.skeleton.without_dropout(),
            engine.functions.no_recompile(),
        ):
            for index in range(rows.total_steps):
                if stopped():
                    break
                scores.append(engine.executor.evaluate(prefetch.of_step(index).micro_batches))
        for score in scores:  # a step may be issued only when all of them have ended
            score.told.wait()
        engine.executor.take_spans()  # of no step
        if len(scores) < rows.total_steps or self._stop.at is not None:
            return None
        tokens = sum(score.num_targets for score in scores)
        loss = math.fsum(score.loss_sum for score in scores) / max(tokens, 1)
        return EvalRecord(step, loss, perplexity(loss), tokens, time.perf_counter() - began)

    def scalars(self, step: int, learning_rate: float, grad_scale: float = 1.0) -> AdamStep:
        """What the optimizer applies in a step, counted from 1."""
        optimizer = self._config.optimizer
        return AdamStep(
            step=step,
            lr=learning_rate,
            beta1=optimizer.betas[0],
            beta2=optimizer.betas[1],
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            grad_scale=grad_scale,
            seed=self._config.train.seed,
        )

    def _update(self, index: int) -> StepUpdate:
        return StepUpdate(
            step=index + 1,
            base=self.scalars(index + 1, self._learning_rate(index)),
            max_grad_norm=self._config.optimizer.max_grad_norm,
            eager=self._engine.plan.decisions.eager,
            spec=self._engine.skeleton.spec,
            store=self._engine.store,
            updater=self._engine.updater,
            stop=self._stop,
            # Without lanes of their own, updates begin when all else of the step has ended.
            landed=isinstance(self._engine.lanes, InlineLanes),
        )

    def _learning_rate(self, index: int) -> float:
        schedule, total = self._config.schedule, self._rows.total_steps
        warmup = schedule.warmup_steps
        if schedule.warmup_ratio is not None:
            warmup = warmup_steps_of(schedule.warmup_ratio, total)
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
        times: tuple[float, float, float],
    ) -> StepRecord:
        began, ended, waited = times
        parts = breakdown(self._engine.executor.take_spans(), began, ended, waited)
        steps_here = index - self._start.step
        rows_so_far = self._start.row + steps_here * self._rows.rows_per_step + rows.num_rows
        return StepRecord(
            step=index + 1,
            loss=update.loss,
            learning_rate=self._learning_rate(index),
            grad_norm=update.grad_norm,
            tokens=issued.num_targets,
            tokens_per_second=issued.num_targets / (ended - began),
            seconds=ended - began,
            phases={
                "forward": issued.loss.seconds_since(issued.start),
                "backward": issued.end.seconds_since(issued.loss),
                "update": parts.update_seconds,
            },
            epoch=rows_so_far / self._rows.rows_per_epoch,
            rows=rows.num_rows,
            breakdown=asdict(parts),
        )


def dropout_seed(seed: int, step: int, layer: int, micro_batch: int) -> int:
    """63 bits that differ for every argument: recompute draws the masks of forward again."""
    key = f"{seed}:{step}:{layer}:{micro_batch}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) >> 1
