"""When a run is evaluated."""

from collections.abc import Collection
from pathlib import Path

from megatrain_cli.config.schema import EvalSection
from megatrain_cli.errors import CorruptError
from megatrain_cli.report.journal import read_evaluations
from megatrain_cli.report.records import EvalRecord
from megatrain_cli.train.rows import TrainingRows
from megatrain_cli.units import show_number


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
    return Evaluations(asked, rows.total_steps, [one.step for one in _made(rows, journal)])


def note_on_other_evaluation(rows: TrainingRows, journal: Path) -> str | None:
    """What to say where a run was evaluated on something else before; None where it was not.

    Raises:
        CorruptError: A line of the journal is no record.
        StorageError: The journal cannot be read.
    """
    made = [] if rows.evaluation is None else _made(rows, journal)
    if rows.evaluation is None or not made:
        return None
    now, last = int(rows.evaluation.targets.sum()), made[-1]
    if now == last.eval_tokens:
        return None
    return (
        f"evaluated on are {show_number(now, 'token')}, and {last.eval_tokens} up to step "
        f"{last.step}: `eval_loss` does not compare with what it was"
    )


def _made(rows: TrainingRows, journal: Path) -> list[EvalRecord]:
    try:
        found = read_evaluations(journal)
    except CorruptError as error:
        raise CorruptError(f"{error}. Move the file away to go on.") from error
    return [record for record in found if record.step <= rows.start.step]
