"""The rows of each optimizer step, from the config to micro-batches."""

import math
from collections.abc import Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from megatrain_cli.config.schema import TrainConfig
from megatrain_cli.data.batch import find_pad_id, make_micro_batches
from megatrain_cli.data.examples import (
    DataSummary,
    Examples,
    load_examples,
    load_tokenizer,
    preview,
)
from megatrain_cli.data.known import use_template
from megatrain_cli.data.sampler import RowStream
from megatrain_cli.data.source import SourceFile
from megatrain_cli.errors import InternalError
from megatrain_cli.pipeline.compute import MicroBatch
from megatrain_cli.plan.decide import Decisions
from megatrain_cli.train.position import START, Position
from megatrain_cli.units import round_up

# Lengths of rectangles of rows are rounded up to this: matrix kernels like whole tiles, and fewer
# distinct shapes mean fewer allocations.
LENGTH_STEP = 64


@dataclass(frozen=True)
class StepRows:
    """What one optimizer step takes.

    Attributes:
        num_rows: Rows of data; the rest of the micro-batches is padding.
    """

    micro_batches: list[MicroBatch]
    num_rows: int


class RowSource(Protocol):
    """Where a run takes its rows from."""

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run."""

    @property
    def rows_per_step(self) -> int:
        """Rows of a full step."""

    @property
    def examples(self) -> Sized:
        """All rows: one pass over the data."""

    def of_step(self, index: int) -> StepRows:
        """The rows of a step, counted from 0."""


@dataclass(frozen=True)
class TrainingRows:
    """All rows, and which of them each step takes.

    Attributes:
        total_steps: Optimizer steps of the run, those before `start` included.
        start: Where this process goes on.
        example: One row as `(text, trained)` spans, for a person to check.
        chat_template: What `data.template` gave the tokenizer, which belongs into the trained
            model's folder; None where it has its own.
    """

    examples: Examples
    summary: DataSummary
    example: list[tuple[str, bool]]
    total_steps: int
    _config: TrainConfig
    _decisions: Decisions
    _stream: RowStream
    _pad_id: int
    start: Position = START
    chat_template: str | None = None

    def planned(self, decisions: Decisions) -> "TrainingRows":
        """The same rows, divided by another plan."""
        return replace(self, _decisions=decisions)

    @property
    def longest(self) -> int:
        """Tokens of the longest row, rounded up for the kernels: all that a plan has room for."""
        longest = int(np.diff(self.examples.offsets).max())
        return min(round_up(longest, LENGTH_STEP), self._config.data.max_length)

    @property
    def padding(self) -> float:
        """Share of all positions that is padding where every row has the planned length."""
        return 1 - len(self.examples.tokens) / (len(self.examples) * self._decisions.max_length)

    @property
    def rows_per_step(self) -> int:
        """Rows of a full step."""
        return self._decisions.micro_batch_size * self._decisions.num_micro_batches

    def position_after(self, step: int) -> Position:
        """How far the run has come after `step` steps, not fewer than those at `start`."""
        row = self.start.row + self._steps_since_start(step) * self.rows_per_step
        last = self._last_row
        return Position(step, row if last is None else max(self.start.row, min(row, last)))

    def ids_of_step(self, index: int) -> list[int]:
        """Which rows a step takes, as places in `examples`; see `of_step`."""
        since = self._steps_since_start(index)
        return self._stream.rows_of_update(
            since, self.rows_per_step, self._last_row, self.start.row
        )

    def _steps_since_start(self, step: int) -> int:
        if step < self.start.step:
            raise InternalError(f"Step {step} is before {self.start.step}, where this run goes on.")
        return step - self.start.step

    @property
    def _last_row(self) -> int | None:
        epochs = self._config.train.num_epochs
        return None if epochs is None else _rows_in(epochs, len(self.examples))

    def of_step(self, index: int) -> StepRows:
        """The rows of a step, counted from 0, not before `start`."""
        d = self._decisions
        rows = [self.examples.row(i) for i in self.ids_of_step(index)]
        length = None
        if d.compiled:
            length = d.max_length
        elif d.micro_batch_size > 1:
            longest = max(len(ids) for ids, _ in rows)
            length = min(round_up(longest, LENGTH_STEP), d.max_length)
        micro = make_micro_batches(
            rows, d.micro_batch_size, d.num_micro_batches, self._pad_id, length, d.max_length
        )
        return StepRows([MicroBatch(m.input_ids, m.labels) for m in micro], len(rows))


def load_rows(
    config: TrainConfig,
    decisions: Decisions,
    start: Position = START,
) -> TrainingRows:
    """Read and tokenise all data.

    Args:
        config: What was asked.
        decisions: How a step's rows are divided.
        start: Where a resumed run goes on. The passes of `train.num_epochs` are counted in rows,
            so those taken before count, in whatever batches they were taken.

    Raises:
        DataError: A row cannot be used, or none has anything to learn.
        ModelError: The model folder has no tokenizer.
    """
    tokenizer = load_tokenizer(Path(config.model.path))
    data, train = config.data, config.train
    use_template(tokenizer, data.template)
    files = [SourceFile(Path(s.path), s.format or data.format) for s in data.train]
    examples, summary = load_examples(
        files,
        tokenizer,
        max_length=data.max_length,
        overlong=data.overlong,
        train_on_prompt=data.train_on_prompt,
    )
    if train.max_steps is not None:
        steps = train.max_steps
    else:
        assert train.num_epochs is not None  # the schema wants exactly one of the two
        left = _rows_in(train.num_epochs, len(examples)) - start.row
        rows_per_step = train.micro_batch_size * train.gradient_accumulation_steps
        steps = start.step + math.ceil(max(0, left) / rows_per_step)
    return TrainingRows(
        examples=examples,
        summary=summary,
        example=preview(examples, tokenizer, 0),
        total_steps=steps,
        _config=config,
        _decisions=decisions,
        _stream=RowStream(len(examples), train.seed, data.shuffle),
        _pad_id=find_pad_id(tokenizer),
        start=start,
        chat_template=None if data.template is None else tokenizer.chat_template,
    )


def _rows_in(epochs: float, num_rows: int) -> int:
    return math.ceil(epochs * num_rows)
