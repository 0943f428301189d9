"""B7, a test of the tests: whatever a resume could lose or damage, the comparison of B1 reports.

Each row drops or damages one thing between the save and the resume. A loss compared with a
tolerance, or the last one alone, would let several of them pass.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatrain_cli.errors import Stopped
from megatrain_cli.optim.adamw import AdamStep
from megatrain_cli.train import loop
from megatrain_cli.train.loop import Run
from tests.checkpoint.signed import change_in
from tests.train.damage import (
    Change,
    change_tensors,
    read_tensor,
    rehash,
    through_bf16,
    with_one_bit,
    zeroed,
)
from tests.train.same_runs import checkpoints, differences, steps_of
from tests.train.whole_runs import Runs, stop, with_dropout

SAVED, TOTAL = 4, 8
AT_ONCE = SAVED + 1
LATER = SAVED + 2  # the loss of a step is known before its update

Damage = Callable[[Path, pytest.MonkeyPatch], object]
ONE = "transformer.h.1.mlp.c_fc.weight"
PAIR = [f"exp_avg.transformer.h.{n}.attn.c_attn.weight" for n in (0, 1)]


def swap_two_moments(folder: Path) -> None:
    left, right = (read_tensor(folder, name) for name in PAIR)
    change_tensors(folder, {PAIR[0]: lambda _: right, PAIR[1]: lambda _: left})


def move_to_row(row: Callable[[int], int], folder: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        manifest["data"]["next_row"] = row(manifest["data"]["next_row"])

    change_in(folder, change)


def other_dropout(patch: pytest.MonkeyPatch) -> None:
    seed = loop.dropout_seed
    patch.setattr(loop, "dropout_seed", lambda *args: seed(*args) ^ 1)


def reset_adam_step(patch: pytest.MonkeyPatch) -> None:
    scalars = Run.scalars

    def reset(self: Run, step: int, *args: float) -> AdamStep:
        # The step's number also says where it belongs: only the bias correction is set back.
        return scalars(self, step - SAVED, *args)

    patch.setattr(Run, "scalars", reset)


def reset_rate(patch: pytest.MonkeyPatch) -> None:
    rate = Run._learning_rate
    patch.setattr(Run, "_learning_rate", lambda self, index: rate(self, index - SAVED))


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        earliest: The first step whose numbers can differ.
        surely: They do there; elsewhere the tensors tell, and the numbers may not.
        files: Changes the checkpoint.
        patch: Changes what resume makes of it.
        steps: Length of the resumed run.
    """

    earliest: int
    surely: bool = False
    files: Callable[[Path], object] = lambda folder: None
    patch: Callable[[pytest.MonkeyPatch], object] = lambda patch: None
    steps: int | None = None


def tensors(prefix: str, change: Change) -> Callable[[Path], object]:
    return partial(change_tensors, changes={prefix: change})


TABLE = {
    "one weight bit": Row(AT_ONCE, files=tensors(ONE, with_one_bit)),
    "one bit of a remainder": Row(LATER, files=tensors(f"master_lo.{ONE}", with_one_bit)),
    "exp_avg_sq of one tensor via BF16": Row(
        LATER, files=tensors(f"exp_avg_sq.{ONE}", through_bf16)
    ),
    "all moments via BF16": Row(LATER, files=tensors("exp_avg", through_bf16)),
    "two moments of equal shape swapped": Row(LATER, files=swap_two_moments),
    "weights via BF16, remainders lost": Row(LATER, files=tensors("master_lo.", zeroed)),
    "dropout of another seed": Row(AT_ONCE, surely=True, patch=other_dropout),
    "Adam step reset": Row(LATER, surely=True, patch=reset_adam_step),
    "position off by one micro-batch": Row(
        AT_ONCE, surely=True, files=partial(move_to_row, lambda row: row - 1)
    ),
    "total_steps changed by 10": Row(AT_ONCE, surely=True, steps=TOTAL + 10),
    "first moment zeroed": Row(LATER, surely=True, files=tensors("exp_avg.", zeroed)),
    "data restarted": Row(AT_ONCE, surely=True, files=partial(move_to_row, lambda row: 0)),
    "LR step reset": Row(AT_ONCE, surely=True, patch=reset_rate),
    "second moment zeroed": Row(LATER, surely=True, files=tensors("exp_avg_sq.", zeroed)),
}


@dataclass(frozen=True)
class Halfway:
    """A whole run, and the same run as a stop left it."""

    runs: Runs
    whole: Path
    stopped: Path

    def copy(self, name: str) -> Path:
        """The stopped run once more."""
        return Path(shutil.copytree(self.stopped, self.stopped.parent / name))


@pytest.fixture(scope="module")
def halfway(tmp_path_factory: pytest.TempPathFactory) -> Halfway:
    runs = with_dropout(tmp_path_factory.mktemp("mutations"), TOTAL)
    return Halfway(
        runs, runs.train("whole"), runs.train("stopped", after={SAVED: stop}, ends=Stopped)
    )


def test_without_damage_there_is_no_difference(halfway: Halfway) -> None:
    run = halfway.copy("nothing")
    rehash(checkpoints(run)[-1])
    halfway.runs.resume(run)
    assert not differences(halfway.whole, run)


@pytest.mark.parametrize("name", TABLE)
def test_every_damage_is_reported_with_where_it_first_shows(
    name: str, halfway: Halfway, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, run = TABLE[name], halfway.copy(name)
    row.files(checkpoints(run)[-1])
    row.patch(monkeypatch)
    longer = row.steps is not None
    halfway.runs.resume(
        run,
        steps=row.steps,
        after={TOTAL: stop} if longer else {},
        ends=Stopped if longer else None,
    )
    assert len(steps_of(run)) == TOTAL
    found = differences(halfway.whole, run)
    assert found.tensors, "all tensors are equal, so nothing was damaged or it healed"
    if row.surely:
        assert found.step == row.earliest
    else:
        assert found.step is None or found.step >= row.earliest
