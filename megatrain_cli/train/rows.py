"""The rows of each optimizer step, from the config to micro-batches."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megatrain_cli.config.schema import TrainConfig
from megatrain_cli.data.arrange import arrange
from megatrain_cli.data.batch import find_pad_id, join, make_micro_batches
from megatrain_cli.data.examples import preview
from megatrain_cli.data.load import load_data
from megatrain_cli.data.mixing import MIXING, MixedStream
from megatrain_cli.data.pack import RULE as PACKING
from megatrain_cli.data.pack import Packs
from megatrain_cli.data.prepare import Prepared, Progress
from megatrain_cli.data.sampler import ORDER, RowOrder, rows_of_update
from megatrain_cli.data.table import Examples
from megatrain_cli.errors import ConfigError, InternalError
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
    def rows_per_epoch(self) -> int:
        """Rows of one pass over the data."""

    def of_step(self, index: int) -> StepRows:
        """The rows of a step, counted from 0."""


@dataclass(frozen=True)
class TrainingRows:
    """All rows, and which of them each step takes.

    A row is what is shuffled, counted and resumed by: a document, or with `data.packing` a pack.

    Attributes:
        data: All documents, and where they come from.
        packs: Which documents are in which row; None where each is a row of its own.
        total_steps: Optimizer steps of the run, those before `start` included.
        start: Where this process goes on.
        example: One row as `(text, trained)` spans, for a person to check.
        chat_template: What `data.template` gave the tokenizer, which belongs into the trained
            model's folder; None where it has its own.
    """

    data: Prepared
    example: list[tuple[str, bool]]
    total_steps: int
    _config: TrainConfig
    _decisions: Decisions
    _stream: RowOrder
    _pad_id: int
    start: Position = START
    chat_template: str | None = None
    packs: Packs | None = None

    @property
    def examples(self) -> Examples:
        """All documents."""
        return self.data.examples

    def planned(self, decisions: Decisions) -> "TrainingRows":
        """The same rows, divided by another plan."""
        return replace(self, _decisions=decisions)

    @property
    def longest(self) -> int:
        """Tokens of the longest row, rounded up for the kernels: all that a plan has room for."""
        return min(round_up(int(self._lengths.max()), LENGTH_STEP), self._config.data.max_length)

    @property
    def padding(self) -> float:
        """Share of all positions that is padding where every row has the planned length."""
        lengths = self._lengths
        return 1 - int(lengths.sum()) / (len(lengths) * self._decisions.max_length)

    @property
    def _lengths(self) -> NDArray[np.int64]:
        return self.examples.lengths if self.packs is None else self.packs.lengths

    @property
    def rows_per_epoch(self) -> int:
        """Rows of one pass over the data."""
        return self._stream.num_rows

    @property
    def order(self) -> str:
        """Names the rules that decide which documents a row holds and which row comes next."""
        rules = [ORDER]
        if isinstance(self._stream, MixedStream):
            rules.append(MIXING)
        if self.packs is not None:
            rules.append(PACKING)
        return "+".join(rules)

    def lines(self) -> list[str]:
        """What became of the rows of the files, a line a fact."""
        packed = [] if self.packs is None else [self.packs.line()]
        return [*self.data.summary.lines(), *packed]

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
        """Which rows a step takes: places in `packs` or, without, in `examples`; see `of_step`."""
        since = self._steps_since_start(index)
        return rows_of_update(
            self._stream, since, self.rows_per_step, self._last_row, self.start.row
        )

    def _steps_since_start(self, step: int) -> int:
        if step < self.start.step:
            raise InternalError(f"Step {step} is before {self.start.step}, where this run goes on.")
        return step - self.start.step

    @property
    def _last_row(self) -> int | None:
        epochs = self._config.train.num_epochs
        return None if epochs is None else _rows_in(epochs, self.rows_per_epoch)

    def of_step(self, index: int) -> StepRows:
        """The rows of a step, counted from 0, not before `start`."""
        d = self._decisions
        ids, lengths = self.ids_of_step(index), None
        if self.packs is None:
            rows = [self.examples.row(i) for i in ids]
        else:
            packs = [[self.examples.row(i) for i in self.packs.row(id_)] for id_ in ids]
            lengths = [[len(tokens) for tokens, _ in documents] for documents in packs]
            rows = [join(documents) for documents in packs]
        length = None
        if d.compiled:
            length = d.max_length
        elif d.micro_batch_size > 1:
            longest = max(len(ids) for ids, _ in rows)
            length = min(round_up(longest, LENGTH_STEP), d.max_length)
        micro = make_micro_batches(
            rows,
            d.micro_batch_size,
            d.num_micro_batches,
            self._pad_id,
            length,
            d.max_length,
            lengths,
        )
        return StepRows([MicroBatch(m.input_ids, m.labels, m.documents) for m in micro], len(rows))


def load_rows(
    config: TrainConfig,
    decisions: Decisions,
    start: Position = START,
    say: Callable[[str], None] = lambda text: None,
    progress: Progress = lambda rows, share: None,
) -> TrainingRows:
    """Read and tokenise all data, or take what was made of it before.

    Args:
        config: What was asked.
        decisions: How a step's rows are divided.
        start: Where a resumed run goes on. The passes of `train.num_epochs` are counted in rows,
            so those taken before count, in whatever batches they were taken.
        say: Told what a person should know.
        progress: Told how far it has come.

    Raises:
        ConfigError: The run has gone beyond its passes over the data.
        DataError: A row cannot be used, or none has anything to learn.
        ModelError: The model folder has no tokenizer.
        StorageError: The disk refused.
    """
    data, train = config.data, config.train
    loaded = load_data(config, say, progress)
    tokenizer, prepared = loaded.tokenizer, loaded.prepared
    packs, stream = arrange(config, loaded, decisions.max_length)
    if train.max_steps is not None:
        steps = train.max_steps
    else:
        assert train.num_epochs is not None  # the schema wants exactly one of the two
        last = _rows_in(train.num_epochs, stream.num_rows)
        left = last - start.row
        if left < 0:
            raise ConfigError(
                f"train.num_epochs: the run has taken {start.row} rows already, beyond {last}, the "
                f"end of {train.num_epochs:g} passes over {stream.num_rows} rows. Ask for more, or "
                "name an earlier checkpoint."
            )
        rows_per_step = train.micro_batch_size * train.gradient_accumulation_steps
        steps = start.step + math.ceil(left / rows_per_step)
    return TrainingRows(
        data=prepared,
        example=preview(prepared.examples, tokenizer, 0),
        total_steps=steps,
        _config=config,
        _decisions=decisions,
        _stream=stream,
        _pad_id=find_pad_id(tokenizer),
        start=start,
        chat_template=None if data.template is None else tokenizer.chat_template,
        packs=packs,
    )


def _rows_in(epochs: float, num_rows: int) -> int:
    return math.ceil(epochs * num_rows)
