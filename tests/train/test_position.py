"""A run goes on at a row, not at a step: no row is skipped or taken twice, whatever the batches.

Property B13: over any stops, and any change of batch size at each, every row occurs exactly once in
each epoch, and in the order of a run that was never stopped.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.data.held_out import Documents
from megatrain_cli.data.pack import Packs
from megatrain_cli.data.prepare import Prepared
from megatrain_cli.data.sampler import RowStream
from megatrain_cli.data.summary import DataSummary
from megatrain_cli.data.table import Examples
from megatrain_cli.errors import InternalError
from megatrain_cli.train.eval_rows import EvaluationRows
from megatrain_cli.train.position import Position
from megatrain_cli.train.rows import TrainingRows, load_rows
from tests.plan.small import GPU, make_config, make_spec, plan_for
from tests.train.workspace import make_workspace, start

SUMMARY = DataSummary({}, 0, 0, {}, 0, 0, 0, 0, 0)


def make_rows(
    num_rows: int, per_step: int, at: Position, *, epochs: float | None, shuffle: bool = True
) -> TrainingRows:
    """Rows of one token each, as a process that goes on at `at` has them."""
    train: dict[str, object] = {"micro_batch_size": per_step, "seed": 7}
    train |= {"max_steps": None if epochs else 1000, "num_epochs": epochs}
    sections: dict[str, dict[str, object]] = {"train": train, "data": {"shuffle": shuffle}}
    tokens = np.arange(num_rows, dtype=np.int32)
    examples = Examples(tokens, np.ones(num_rows, np.bool_), np.arange(num_rows + 1))
    return TrainingRows(
        data=Prepared(examples, SUMMARY, (), "0" * 32),
        documents=Documents(examples),
        example=[],
        total_steps=0,
        _config=make_config(sections),
        _decisions=plan_for(make_spec(), GPU, sections).decisions,
        _stream=RowStream(num_rows, 7, shuffle),
        _pad_id=0,
        start=at,
    )


legs = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 4)), min_size=1, max_size=8)


def ledger(num_rows: int, legs: list[tuple[int, int]]) -> tuple[list[int], Position]:
    """Ids in the order they were taken, over processes of (rows a step, steps before a stop)."""
    taken: list[int] = []
    at = Position()
    for per_step, steps in legs:
        rows = make_rows(num_rows, per_step, at, epochs=None)
        for index in range(at.step, at.step + steps):
            taken += rows.ids_of_step(index)
        at = rows.position_after(at.step + steps)
    return taken, at


@given(st.integers(1, 23), legs)
def test_each_row_comes_once_an_epoch_over_any_stops_and_batch_sizes(
    num_rows: int, legs: list[tuple[int, int]]
) -> None:
    taken, at = ledger(num_rows, legs)
    assert at == Position(sum(steps for _, steps in legs), len(taken))
    unbroken = RowStream(num_rows, 7, shuffle=True)
    assert taken == unbroken.rows(0, len(taken))
    for begin in range(0, len(taken) - num_rows + 1, num_rows):
        epoch = Counter(taken[begin : begin + num_rows])
        assert epoch == Counter(range(num_rows))


def test_without_the_row_in_the_position_a_change_of_batch_size_repeats_rows() -> None:
    """The control: steps times the new batch size is another row than the one that is next."""
    at = Position(step=4, row=8)
    right = make_rows(12, 4, at, epochs=None).ids_of_step(4)
    wrong = make_rows(12, 4, Position(step=4, row=4 * 4), epochs=None).ids_of_step(4)
    assert right == RowStream(12, 7, shuffle=True).rows(8, 12)
    assert wrong != right


@given(st.integers(1, 23), st.floats(0.1, 3), st.integers(1, 9), st.integers(1, 9), st.data())
def test_passes_over_the_data_end_at_the_same_row_whatever_the_batches(
    num_rows: int, epochs: float, before: int, after: int, data: st.DataObject
) -> None:
    last = int(np.ceil(epochs * num_rows))
    first = make_rows(num_rows, before, Position(), epochs=epochs)
    steps = -(-last // before)
    assert first.position_after(steps) == Position(steps, last)
    stop = data.draw(st.integers(0, steps))
    at = first.position_after(stop)
    second = make_rows(num_rows, after, at, epochs=epochs)
    total = stop + -(-(last - at.row) // after)
    taken = [i for index in range(stop) for i in first.ids_of_step(index)]
    taken += [i for index in range(stop, total) for i in second.ids_of_step(index)]
    unbroken = RowStream(num_rows, 7, shuffle=True)
    assert taken == unbroken.rows(0, last)
    assert second.position_after(total).row == last
    assert second.ids_of_step(total) == []


def test_a_plan_counts_the_rows_that_are_left_to_the_process() -> None:
    """Kernels are made for the lengths that this process meets, not for those of the whole run."""
    whole = replace(make_rows(100, 2, Position(), epochs=None), total_steps=49)
    ends = np.cumsum([0, *range(1, 101)])  # each row of another length
    tokens = np.zeros(ends[-1], np.int32)
    examples = Examples(tokens, np.ones(len(tokens), np.bool_), ends)
    whole = replace(
        whole, documents=Documents(examples), data=replace(whole.data, examples=examples)
    )
    left = replace(whole, start=whole.position_after(48))
    found = [(f.steps, f.lengths, f.spans) for f in (whole.facts, left.facts)]
    assert found == [(49, 98, 98), (1, 2, 2)]
    assert replace(whole, start=Position(49, 98)).facts.lengths == 0


@pytest.mark.parametrize("packing", [False, True])
def test_a_plan_counts_what_is_only_evaluated(packing: bool) -> None:
    """Lengths and targets that are trained on have their forward, if they are known to come."""
    whole = make_rows(6, 2, Position(), epochs=None)

    def documents(*lengths: int, prompt: int) -> Documents:
        ends = np.cumsum([0, *lengths])
        is_target = np.ones(ends[-1], np.bool_)
        for begin in ends[:-1]:
            is_target[begin : begin + prompt] = False
        return Documents(Examples(np.zeros(ends[-1], np.int32), is_target, ends))

    def alone(documents: Documents) -> Packs | None:
        n = np.arange(len(documents) + 1)
        return Packs(n[:-1], n, documents.lengths, 9, (len(documents),)) if packing else None

    trained, evaluated = documents(4, 5, 6, 7, 7, 7, prompt=2), documents(6, 7, 8, 8, 9, prompt=0)
    evaluation = EvaluationRows(evaluated, alone(evaluated), (), whole._decisions, 0)
    whole = replace(whole, documents=trained, packs=alone(trained), evaluation=evaluation)
    assert whole.row_targets.tolist() == [2, 3, 4, 5, 5, 5]
    assert evaluation.targets.tolist() == [5, 6, 7, 7, 8]  # nothing predicts the first
    found = [replace(whole, total_steps=n).facts for n in (2, 1)]
    assert [(f.lengths, f.eval_lengths) for f in found] == [(4, 2), (2, 4)]
    assert [(f.targets, f.eval_targets) for f in found] == [(4, 3), (2, 4)]
    assert replace(whole, evaluation=None).facts.eval_lengths == 0


def test_rows_before_the_position_cannot_be_asked_for() -> None:
    rows = make_rows(5, 2, Position(3, 6), epochs=None)
    for ask in (rows.ids_of_step, rows.position_after):
        with pytest.raises(InternalError, match="Step 2 is before 3"):
            ask(2)


def test_the_steps_of_a_resumed_run_are_those_of_the_unbroken_one(tmp_path: Path) -> None:
    config = make_workspace(tmp_path, rows=10, data={"shuffle": True})
    with start(config) as run:
        position = run.rows.position_after(2)
        assert position == Position(2, 8)
        again = load_rows(run.loaded.config, run.engine.plan.decisions, position)
        again = again.planned(run.engine.plan.decisions)
        assert again.start == position
        assert again.total_steps == run.rows.total_steps == 3
        one, other = run.rows.of_step(2), again.of_step(2)
        assert one.num_rows == other.num_rows
        for a, b in zip(one.micro_batches, other.micro_batches, strict=True):
            assert a.input_ids.tolist() == b.input_ids.tolist()
            assert a.labels.tolist() == b.labels.tolist()
        epochs = run.loaded.config.model_copy(
            update={
                "train": run.loaded.config.train.model_copy(
                    update={"max_steps": None, "num_epochs": 2.0}
                )
            }
        )
        for at, total in ((Position(), 5), (Position(2, 5), 6), (Position(9, 20), 9)):
            assert load_rows(epochs, run.engine.plan.decisions, at).total_steps == total
        assert replace(run.rows, start=Position(9, 20)).position_after(9) == Position(9, 20)
