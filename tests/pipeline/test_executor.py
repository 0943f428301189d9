"""What the executor makes of a schedule beside its ops: the points in time of a step."""

from functools import partial
from pathlib import Path

import pytest
import torch

from megatrain_cli.pipeline.compute import StepInputs
from megatrain_cli.pipeline.lanes import InlineLanes, InlineMark, Work
from megatrain_cli.pipeline.ops import Kind, Op
from tests.pipeline.modes import train


class Diary(InlineLanes):
    """Writes down what it is asked for."""

    def __init__(self, entries: list[Kind | str]) -> None:
        super().__init__()
        self._entries = entries

    def submit(self, op: Op, work: Work, num_bytes: int = 0) -> None:
        self._entries.append(op.kind)
        super().submit(op, work, num_bytes)

    def mark(self) -> InlineMark:
        self._entries.append("mark")
        return super().mark()


def test_every_mark_of_a_step_is_before_the_report_that_the_clip_waits_for(
    configs: dict[str, Path],
) -> None:
    """Times of a step are read when it is clipped: a mark behind the report may not be reached."""
    entries: list[Kind | str] = []

    def lanes(device: torch.device) -> Diary:
        del device
        return Diary(entries)

    train(configs, "direct", lanes)
    steps = entries[: len(entries) // 3]
    assert entries == 3 * steps
    report = steps.index(Kind.REPORT)
    assert "mark" not in steps[report:]
    end, loss = [i for i, entry in enumerate(steps) if entry == "mark"][:0:-1]
    assert Kind.BACKWARD in steps[loss:end]
    assert Kind.BACKWARD not in [*steps[:loss], *steps[end:]]
    assert steps[loss - 1] is Kind.LOSS


@pytest.mark.parametrize("name", ["direct", "kept", "eager"])
def test_what_layers_are_given_is_let_go_of_with_the_step(
    name: str, configs: dict[str, Path]
) -> None:
    """An update or a lane's thread may hold the step far into the next one."""
    steps: list[StepInputs] = []

    class Keeper(InlineLanes):
        def submit(self, op: Op, work: Work, num_bytes: int = 0) -> None:
            super().submit(op, work, num_bytes)
            assert isinstance(work, partial)
            _, inner = work.args
            steps.extend(x for x in inner.args if isinstance(x, StepInputs))

    train(configs, name, lambda device: Keeper())
    assert steps
    assert all(step.args == {} for step in steps)
