"""What a change of rows, or of their order, means for a run that goes on is said with numbers."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatrain_cli.checkpoint.facts import DataFacts, SourceFile
from megatrain_cli.data.held_out import HELD_OUT
from megatrain_cli.data.pack import RULE as PACKING
from megatrain_cli.errors import Stopped
from megatrain_cli.train.other_rows import notes_on_other_rows
from tests.train.whole_runs import Runs, stop
from tests.train.workspace import make_rows, make_workspace

ORDER = "feistel-v1"
HELD, PACKED = f"{ORDER}+{HELD_OUT}", f"{ORDER}+{PACKING}"
TWICE = (
    "from step 6 on rows come in another order, in the middle of epoch 2: some of its rows may be "
    "taken twice, others not at all"
)
FLATTERED = (
    "other rows are held out for evaluation than up to step 5: what of them was trained on till "
    "then makes `eval_loss` too low"
)
OTHER = (
    "data.train: other files than up to step 5: 21 rows an epoch, 13 then. 20 rows were taken, so "
    "the next one is row 21 of epoch 1. Rows are counted and not compared: some may come again, "
    "others not at all"
)


def facts(files: str = "a", **changed: object) -> DataFacts:
    """13 shuffled rows, of which 20 were taken."""
    sources = tuple(SourceFile(name=name, path=name, bytes=1, xxh3_128=name * 32) for name in files)
    found = DataFacts(
        rows_xxh3_128="0" * 32,
        num_rows=13,
        sources=sources,
        order=ORDER,
        seed=1,
        shuffle=True,
        next_row=20,
        rows_per_step=4,
    )
    return found.model_copy(update=changed)


CASES: Sequence[tuple[DataFacts, DataFacts, list[str]]] = [
    (facts(), facts(), []),
    (facts(), facts(seed=2), [TWICE]),
    (facts(), facts(shuffle=False), [TWICE]),
    (facts(), facts(num_rows=12), [TWICE]),
    (facts(next_row=26), facts(next_row=26, seed=2), []),  # the next epoch begins
    (facts(next_row=0), facts(next_row=0, seed=2, order=HELD), []),
    (facts(shuffle=False), facts(shuffle=False, seed=2), []),  # no row's place depends on it
    (facts(), facts(rows_xxh3_128="1" * 32), []),  # cut shorter, each at its place
    (facts(order=PACKED), facts(order=PACKED, rows_xxh3_128="1" * 32), [TWICE]),
    (
        facts(),
        facts("b", num_rows=21, rows_xxh3_128="1" * 32),
        [
            OTHER,
        ],
    ),
    (facts("a"), facts("bc"), []),  # the same rows, in two files
    (facts(order=HELD), facts(order=HELD), []),
    (facts(), facts(order=HELD, num_rows=10), [TWICE, FLATTERED]),
    (facts(order=HELD), facts(order=HELD, seed=2), [TWICE, FLATTERED]),
    (facts(order=HELD), facts(order=HELD, num_rows=9), [TWICE, FLATTERED]),
    # Fewer are held out: all of them were before.
    (facts(order=HELD), facts(order=HELD, num_rows=14), [TWICE]),
    (facts(order=HELD), facts(order=HELD, rows_xxh3_128="1" * 32), [FLATTERED]),
]


@pytest.mark.parametrize(("saved", "now", "notes"), CASES)
def test_what_becomes_of_the_epoch_and_of_the_evaluation_is_said(
    saved: DataFacts, now: DataFacts, notes: list[str]
) -> None:
    assert notes_on_other_rows(saved, now, 5) == notes


def test_a_run_that_goes_on_with_other_rows_says_so(tmp_path: Path) -> None:
    runs = Runs(make_workspace(tmp_path, data={"shuffle": True}, train={"max_steps": 4}))
    run = runs.train("run", after={2: stop}, ends=Stopped)
    assert "in another order" not in runs.resume(run, after={3: stop}, ends=Stopped)
    lines = (json.dumps(row) + "\n" for row in make_rows(21))
    (tmp_path / "train.jsonl").write_text("".join(lines))
    said = runs.resume(run, allow_change=("data.train",))
    assert "data.train: other files than up to step 3: 21 rows an epoch, 12 then. 12 rows" in said
    said = runs.resume(run, "data.eval_share=0.2", steps=6, allow_change=("eval_share",))
    assert "from step 5 on rows come in another order, in the middle of epoch 1" in said
    assert "other rows are held out for evaluation than up to step 4" in said
