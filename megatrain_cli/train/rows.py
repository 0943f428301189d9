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
from megatrain_cli.data.sampler import RowStream
from megatrain_cli.data.source import SourceFile
from megatrain_cli.pipeline.compute import MicroBatch
from megatrain_cli.plan.decide import Decisions
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
        total_steps: Optimizer steps of the run.
        example: One row as `(text, trained)` spans, for a person to check.
    """

    examples: Examples
    summary: DataSummary
    example: list[tuple[str, bool]]
    total_steps: int
    _config: TrainConfig
    _decisions: Decisions
    _stream: RowStream
    _pad_id: int

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

    def of_step(self, index: int) -> StepRows:
        """The rows of a step, counted from 0."""
        train, d = self._config.train, self._decisions
        total = None
        if train.num_epochs is not None:
            total = math.ceil(train.num_epochs * len(self.examples))
        chosen = self._stream.rows_of_update(index, self.rows_per_step, total)
        rows = [self.examples.row(i) for i in chosen]
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


def load_rows(config: TrainConfig, decisions: Decisions) -> TrainingRows:
    """Read and tokenise all data.

    Raises:
        DataError: A row cannot be used, or none has anything to learn.
        ModelError: The model folder has no tokenizer.
    """
    tokenizer = load_tokenizer(Path(config.model.path))
    data, train = config.data, config.train
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
        rows = math.ceil(train.num_epochs * len(examples))
        steps = math.ceil(rows / (train.micro_batch_size * train.gradient_accumulation_steps))
    return TrainingRows(
        examples=examples,
        summary=summary,
        example=preview(examples, tokenizer, 0),
        total_steps=steps,
        _config=config,
        _decisions=decisions,
        _stream=RowStream(len(examples), train.seed, data.shuffle),
        _pad_id=find_pad_id(tokenizer),
    )
