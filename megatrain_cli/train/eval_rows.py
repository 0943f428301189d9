"""The rows that a run is evaluated on, each once, in their order."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megatrain_cli.config.schema import DataSection
from megatrain_cli.data.chunks import Encoding
from megatrain_cli.data.held_out import Documents
from megatrain_cli.data.pack import Packs, pack_documents
from megatrain_cli.data.prepare import HowToPrepare, prepare
from megatrain_cli.data.repeats import ReadFile, read_files, repeated, trained_on
from megatrain_cli.data.sources import find_sources
from megatrain_cli.plan.decide import Decisions
from megatrain_cli.train.layout import StepRows, lay_out

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class EvaluationRows:
    """All rows to evaluate on, divided as a step's rows are.

    Attributes:
        documents: What is evaluated.
        packs: Which of them share a row; None where each is a row of its own.
        lines: What became of the rows of their files.
    """

    documents: Documents
    packs: Packs | None
    lines: tuple[str, ...]
    _decisions: Decisions
    _pad_id: int

    def planned(self, decisions: Decisions) -> "EvaluationRows":
        """The same rows, divided by another plan."""
        return replace(self, _decisions=decisions)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row."""
        return self.documents.lengths if self.packs is None else self.packs.lengths

    @property
    def targets(self) -> NDArray[np.int32]:
        """How many tokens of each row are predicted."""
        targets = self.documents.targets
        return targets if self.packs is None else self.packs.sums(targets)

    @property
    def rows_per_step(self) -> int:
        """Rows that pass through the layers together."""
        return self._decisions.micro_batch_size * self._decisions.num_micro_batches

    @property
    def total_steps(self) -> int:
        """How many times rows pass through the layers."""
        return -(-len(self.lengths) // self.rows_per_step)

    @property
    def rows_per_epoch(self) -> int:
        """All rows."""
        return len(self.lengths)

    def of_step(self, index: int) -> StepRows:
        """The rows of one pass, counted from 0; the last one may have fewer."""
        first = index * self.rows_per_step
        ids = range(first, min(first + self.rows_per_step, self.rows_per_epoch))
        return lay_out(ids, self.documents, self.packs, self._decisions, self._pad_id)


def evaluation_rows(
    documents: Documents, lines: tuple[str, ...], packing: bool, d: Decisions, pad_id: int
) -> EvaluationRows:
    """Lay out documents to evaluate on; where rows are packed, these are too."""
    packs = None
    if packing:
        lengths = documents.lengths
        room = max(d.max_length, int(lengths.max()))
        packs = pack_documents(lengths, [np.arange(len(documents))], room)
    return EvaluationRows(documents, packs, lines, d, pad_id)


def load_evaluation(
    data: DataSection,
    tokenizer: "PreTrainedTokenizerBase",
    progress: Callable[[int, float], None],
    say: Callable[[str], None],
    trained: Iterable[ReadFile] = (),
) -> tuple[Documents, tuple[str, ...], tuple[str, ...]]:
    """Read the rows of `data.eval`; what became of them, and which are not new, a line a fact.

    Args:
        data: What was asked.
        tokenizer: With the template of the config.
        progress: Told how far it has come.
        say: Told what a person should know.
        trained: The files that are trained on: one that is evaluated on too is told.

    Raises:
        DataError: A row cannot be used, or none has anything to predict.
        StorageError: The disk refused.
    """
    assert data.eval is not None
    sources = find_sources(data, data.eval)
    prepared = prepare(
        sources,
        tokenizer,
        Encoding(data.max_length, data.overlong, data.train_on_prompt),
        data.on_bad_row,
        data.max_bad_share,
        HowToPrepare(data.workers, data.cache_dir, progress, say),
    )
    files, known = read_files(sources, prepared), {file.content for file in trained}
    told = [*repeated(files, "data.eval", "Name it once"), *trained_on(files, known)]
    lines = [f"evaluation: {line}" for line in [*prepared.summary.lines(), *told]]
    return Documents(prepared.examples), tuple(lines), tuple(told)
