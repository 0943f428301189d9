"""B13, P10: over kills, stops and another batch size each row is learnt once an epoch.

A process that dies takes the steps since the last checkpoint with it, and the rows of those steps
are taken again; what counts is what the steps that were kept have taken.
"""

import random
from collections import Counter
from pathlib import Path

import pytest

from megatrain_cli.errors import IncompatibleError, Stopped
from tests.checkpoint.tiles import manifest_of
from tests.train.same_runs import checkpoints, differences, steps_of
from tests.train.whole_runs import Died, Runs, die, stop
from tests.train.workspace import make_workspace

ROWS = 11
EPOCHS = 3
GREW = "train.micro_batch_size=3"
ALLOWED = ("micro_batch_size",)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(
        tmp_path_factory.mktemp("rows"),
        rows=ROWS,
        model={"layers": 1},
        data={"shuffle": True},
        train={"max_steps": None, "num_epochs": EPOCHS, "micro_batch_size": 2},
        checkpoint={"save_steps": 2, "async_save": False},
    )


def kept_rows(runs: Runs) -> list[int]:
    """The rows that the final state has learnt from, in order: of each step its last take."""
    kept = dict(runs.taken)
    return [row for step in sorted(kept) for row in kept[step]]


def interrupt(runs: Runs, run: Path, draw: random.Random) -> int:
    """Resume until the run ends, dying or stopping after a random step each time; how often."""
    for count in range(100):
        done = manifest_of(checkpoints(run)[-1])
        if done.finished:
            return count
        last = len(runs.taken)
        action, ends = draw.choice([(die, Died), (stop, Stopped)])
        step = done.step + draw.randint(1, 4)
        left = ROWS * EPOCHS - done.data.next_row
        reaches = step - done.step <= -(-left // done.data.rows_per_step)
        runs.resume(run, after={step: action}, ends=ends if reaches else None)
        assert len(runs.taken) > last
    raise AssertionError("it never ends")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_each_row_is_learnt_once_an_epoch_whatever_happens_on_the_way(
    seed: int, config: Path
) -> None:
    whole, broken = Runs(config), Runs(config)
    one = whole.train(f"whole-{seed}")
    draw = random.Random(seed)
    run = broken.train(f"run-{seed}", after={2: stop}, ends=Stopped)
    count = interrupt(broken, run, draw)
    assert count > 2
    rows = kept_rows(broken)
    assert rows == kept_rows(whole)
    for epoch in range(EPOCHS):
        assert sorted(rows[epoch * ROWS : (epoch + 1) * ROWS]) == list(range(ROWS))
    assert not differences(one, run)


@pytest.mark.slow
def test_another_batch_size_takes_the_rows_that_are_left(config: Path) -> None:
    """F73: refused unless it is named; the position is counted in rows."""
    whole, runs = Runs(config), Runs(config)
    whole.train("small")
    run = runs.train("grows", after={5: stop}, ends=Stopped)
    runs.resume(run, GREW, ends=IncompatibleError)
    assert len(runs.taken) == 5
    runs.resume(run, GREW, allow_change=ALLOWED, after={7: die}, ends=Died)
    runs.resume(run, GREW, allow_change=ALLOWED, after={7: stop}, ends=Stopped)
    back = "train.micro_batch_size=1"
    runs.resume(run, back, allow_change=ALLOWED, after={9: stop}, ends=Stopped)
    runs.resume(run, GREW, allow_change=ALLOWED)
    rows = kept_rows(runs)
    assert rows == kept_rows(whole)
    assert Counter(rows) == dict.fromkeys(range(ROWS), EPOCHS)
    sizes = [record["rows"] for record in steps_of(run)]
    assert sizes == [2] * 5 + [3, 3] + [1, 1] + [3] * 5
    last = manifest_of(checkpoints(run)[-1])
    assert last.data.next_row == ROWS * EPOCHS
    assert [(c["step"], c["old"], c["new"]) for c in last.changes] == [
        (5, 2, 3),
        (7, 3, 1),
        (9, 1, 3),
    ]
    assert steps_of(run)[-1]["epoch"] == float(EPOCHS).hex()
