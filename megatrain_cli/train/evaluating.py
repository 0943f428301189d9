"""When a run is evaluated."""

from collections.abc import Collection
from pathlib import Path

from megatrain_cli.config.schema import EvalSection
from megatrain_cli.errors import CorruptError
from megatrain_cli.report.journal import read_evaluations
from megatrain_cli.train.rows import TrainingRows


class Evaluations:
    """Says after which steps an evaluation is to be made, each once.

    An evaluation is in the journal before its step's checkpoint is begun. Where a stop or a crash
    came between, a resumed run makes it before its first step, from the same weights.

    Args:
        asked: The section of the config; None where there are no rows to evaluate on.
        total_steps: Of the run; the last one is always evaluated.
        made: Steps whose evaluations are in the journal.
    """

    def __init__(
        self, asked: EvalSection | None, total_steps: int, made: Collection[int] = ()
    ) -> None:
        self._asked, self._total, self._made = asked, total_steps, set(made)

    def is_due(self, step: int) -> bool:
        """Whether one is to be made after `step` steps, 0 being before the first."""
        if self._asked is None or step in self._made:
            return False
        if step == 0 and self._asked.at_start:
            return True
        every = self._asked.steps
        return step == self._total or (every is not None and step > 0 and step % every == 0)


def evaluations_of(asked: EvalSection, rows: TrainingRows, journal: Path) -> Evaluations:
    """The evaluations of a run that goes on at `rows.start`; its journal may be longer.

    Raises:
        CorruptError: A line of the journal is no record.
        StorageError: The journal cannot be read.
    """
    if rows.evaluation is None:
        return Evaluations(None, rows.total_steps)
    try:
        made = {record.step for record in read_evaluations(journal)}
    except CorruptError as error:
        raise CorruptError(f"{error}. Move the file away to go on.") from error
    return Evaluations(asked, rows.total_steps, {s for s in made if s <= rows.start.step})
