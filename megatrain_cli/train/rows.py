"""The rows of each optimizer step, from the config to micro-batches."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megatrain_cli.config.schema import TrainConfig
from megatrain_cli.data.arrange import arrange, hold_out_rows
from megatrain_cli.data.batch import find_pad_id
from megatrain_cli.data.examples import preview
from megatrain_cli.data.held_out import HELD_OUT, Documents, held_out_lines
from megatrain_cli.data.load import load_data
from megatrain_cli.data.mixing import MIXING, MixedStream
from megatrain_cli.data.pack import RULE as PACKING
from megatrain_cli.data.pack import Packs
from megatrain_cli.data.prepare import Prepared, Progress
from megatrain_cli.data.sampler import ORDER, RowOrder, rows_of_update
from megatrain_cli.data.stops import stops_learnt
from megatrain_cli.data.table import Examples
from megatrain_cli.errors import ConfigError, InternalError
from megatrain_cli.plan.decide import Decisions
from megatrain_cli.plan.row_facts import RowFacts
from megatrain_cli.train.eval_rows import EvaluationRows, evaluation_rows, load_evaluation
from megatrain_cli.train.layout import LENGTH_STEP, StepRows, lay_out
from megatrain_cli.train.position import START, Position
from megatrain_cli.units import round_up, show_number

# Rows of a run whose steps are looked at one by one for the one that has most tokens.
_COUNTED_ROWS = 20_000


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
        documents: Those of them that are trained on.
        evaluation: What the run is evaluated on; None if it is not.
        repeats: What `lines` says of files that are read more than once.
        total_steps: Optimizer steps of the run, those before `start` included.
        start: Where this process goes on.
        example: One row as `(text, trained)` spans, for a person to check.
        stop_ids: Of the tokens that end an answer, those that are learnt.
        chat_template: What `data.template` gave the tokenizer, which belongs into the trained
            model's folder; None where it has its own.
    """

    data: Prepared
    documents: Documents
    example: list[tuple[str, bool]]
    total_steps: int
    _config: TrainConfig
    _decisions: Decisions
    _stream: RowOrder
    _pad_id: int
    start: Position = START
    stop_ids: tuple[int, ...] = ()
    chat_template: str | None = None
    packs: Packs | None = None
    evaluation: EvaluationRows | None = None
    repeats: tuple[str, ...] = ()

    @property
    def examples(self) -> Examples:
        """All documents."""
        return self.data.examples

    def planned(self, decisions: Decisions) -> "TrainingRows":
        """The same rows, divided by another plan."""
        evaluation = None if self.evaluation is None else self.evaluation.planned(decisions)
        return replace(self, _decisions=decisions, evaluation=evaluation)

    @property
    def longest(self) -> int:
        """Tokens of the longest row, rounded up for the kernels: all that a plan has room for."""
        longest = int(self.row_lengths.max())
        if self.evaluation is not None:
            longest = max(longest, int(self.evaluation.lengths.max()))
        return min(round_up(longest, LENGTH_STEP), self._config.data.max_length)

    @property
    def facts(self) -> RowFacts:
        """What a plan knows of the rows beside `longest`."""
        documents = [self.data.examples]
        lengths, targets = np.array([], dtype=np.int64), np.array([], dtype=np.int32)
        if self.evaluation is not None:
            documents.append(self.evaluation.documents.examples)
            lengths, targets = self.evaluation.lengths, self.evaluation.targets
        steps = max(0, self.total_steps - self.start.step)
        rows, spans = steps * self.rows_per_step, self.documents.lengths
        num_lengths, eval_lengths = _different(self.row_lengths, lengths, rows)
        num_targets, eval_targets = _different(self.row_targets, targets, rows)
        unique = {id(examples): examples.nbytes for examples in documents}
        return RowFacts(
            step_tokens=self._most_tokens(),
            mean_tokens=float(self.row_lengths.mean()) * self.rows_per_step,
            mapped_bytes=sum(unique.values()),
            eval_rows=len(lengths),
            steps=steps,
            lengths=num_lengths,
            spans=min(len(np.unique(spans)), math.ceil(rows * len(spans) / len(self.row_lengths))),
            targets=num_targets,
            eval_lengths=eval_lengths,
            eval_targets=eval_targets,
        )

    def _most_tokens(self) -> int:
        """Of a step, exactly if that is soon known; else of a step that has the longest rows."""
        lengths, per_step = self.row_lengths, self.rows_per_step
        steps = range(self.start.step, self.total_steps)
        if 0 < len(steps) * per_step <= _COUNTED_ROWS:
            return max(int(lengths[self.ids_of_step(index)].sum()) for index in steps)
        whole, rest = divmod(per_step, len(lengths))
        longest = np.sort(lengths)[len(lengths) - rest :]
        return whole * int(lengths.sum()) + int(longest.sum())

    @property
    def padding(self) -> float:
        """Share of all positions that is padding where every row has the planned length."""
        lengths = self.row_lengths
        return 1 - int(lengths.sum()) / (len(lengths) * self._decisions.max_length)

    @property
    def row_lengths(self) -> NDArray[np.int64]:
        """Tokens of each row that is trained on."""
        return self.documents.lengths if self.packs is None else self.packs.lengths

    @property
    def row_targets(self) -> NDArray[np.int32]:
        """How many tokens of each row that is trained on are predicted."""
        targets = self.documents.targets
        return targets if self.packs is None else self.packs.sums(targets)

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
        if self.documents.ids is not None:
            rules.append(HELD_OUT)
        return "+".join(rules)

    def lines(self) -> list[str]:
        """What became of the rows of the files, a line a fact."""
        packed = [] if self.packs is None else [self.packs.line()]
        evaluated = () if self.evaluation is None else self.evaluation.lines
        return [*self.data.summary.lines(), *packed, *evaluated]

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
        """Which rows a step takes: places in `packs` or, without, in `documents`; see `of_step`."""
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
        ids = self.ids_of_step(index)
        return lay_out(ids, self.documents, self.packs, self._decisions, self._pad_id)


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
    documents, held_out = hold_out_rows(config, loaded)
    lines, repeats = tuple[str, ...](), loaded.repeats
    if data.eval is not None:
        held_out, lines, told = load_evaluation(data, tokenizer, progress, say, loaded.files)
        repeats += told
    elif held_out is not None:
        lines = tuple(held_out_lines(documents))
    packs, stream = arrange(config, loaded, documents, decisions.max_length)
    pad_id, evaluation = find_pad_id(tokenizer), None
    if held_out is not None:
        evaluation = evaluation_rows(held_out, lines, data.packing, decisions, pad_id)
    if train.max_steps is not None:
        steps = train.max_steps
    else:
        assert train.num_epochs is not None  # the schema wants exactly one of the two
        last = _rows_in(train.num_epochs, stream.num_rows)
        left = last - start.row
        if left < 0:
            raise ConfigError(
                f"train.num_epochs: the run has taken {show_number(start.row, 'row')} already, "
                f"beyond {last}, the end of {train.num_epochs:g} passes over "
                f"{show_number(stream.num_rows, 'row')}. Ask for more, or name an earlier "
                "checkpoint."
            )
        rows_per_step = train.micro_batch_size * train.gradient_accumulation_steps
        steps = start.step + math.ceil(left / rows_per_step)
    return TrainingRows(
        data=prepared,
        documents=documents,
        example=preview(prepared.examples, tokenizer, documents.id_of(0)),
        total_steps=steps,
        _config=config,
        _decisions=decisions,
        _stream=stream,
        _pad_id=pad_id,
        start=start,
        stop_ids=stops_learnt(prepared.examples, tokenizer),
        chat_template=None if data.template is None else tokenizer.chat_template,
        packs=packs,
        evaluation=evaluation,
        repeats=repeats,
    )


def _rows_in(epochs: float, num_rows: int) -> int:
    return math.ceil(epochs * num_rows)


def _different(
    trained: NDArray[np.integer], evaluated: NDArray[np.integer], rows: int
) -> tuple[int, int]:
    """Different values among `rows` trained rows at most, and those that evaluated ones add."""
    first, second = np.unique(trained), np.unique(evaluated)
    if len(first) <= rows:  # or which of them come is not known
        second = np.setdiff1d(second, first)
    return min(len(first), rows), len(second)
