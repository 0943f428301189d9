"""After which steps an evaluation is due."""

import pytest

from megatrain_cli.config.schema import EvalSection
from megatrain_cli.train.evaluating import Evaluations


@pytest.mark.parametrize(
    ("asked", "made", "due"),
    [
        (None, (), []),
        (EvalSection(), (), [7]),
        (EvalSection(steps=3), (), [3, 6, 7]),
        (EvalSection(steps=7), (), [7]),
        (EvalSection(steps=9, at_start=True), (), [0, 7]),
        (EvalSection(steps=3, at_start=True), (0, 3), [6, 7]),
    ],
)
def test_each_is_due_once_and_the_last_step_always(
    asked: EvalSection | None, made: tuple[int, ...], due: list[int]
) -> None:
    evaluations = Evaluations(asked, 7, made)
    assert [step for step in range(8) if evaluations.is_due(step)] == due


def test_a_run_of_no_steps_is_evaluated() -> None:
    assert Evaluations(EvalSection(), 0).is_due(0)
