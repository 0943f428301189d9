"""`metrics.jsonl`: one valid JSON object a step; a cut last line loses nothing else."""

import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatrain_cli.errors import CorruptError, StorageError
from megatrain_cli.report.journal import Journal, read_evaluations, read_journal
from megatrain_cli.report.records import EvalRecord, StepRecord, perplexity

numbers = st.floats(allow_nan=False)
records = st.builds(
    StepRecord,
    step=st.integers(1, 10**9),
    loss=numbers,
    learning_rate=numbers,
    grad_norm=numbers,
    tokens=st.integers(0, 10**9),
    tokens_per_second=numbers,
    seconds=numbers,
    phases=st.dictionaries(st.text(), numbers, max_size=3),
    epoch=numbers,
    rows=st.integers(0, 100),
    breakdown=st.dictionaries(st.text(), numbers | st.integers(0, 10**12), max_size=3),
)


def record(step: int, loss: float = 2.5) -> StepRecord:
    phases, parts = {"forward": 0.1}, {"compute_seconds": 0.2, "stream_in_bytes": 7}
    return StepRecord(step, loss, 1e-3, 0.5, 100, 1234.5, 0.25, phases, 0.5, 8, parts)


def no_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(records, max_size=4))
def test_what_is_written_is_read_back(tmp_path: Path, written: list[StepRecord]) -> None:
    path = tmp_path / "metrics.jsonl"
    path.unlink(missing_ok=True)
    with Journal(path) as journal:
        for one in written:
            journal.write(one)
    assert list(read_journal(path)) == written
    lines = path.read_text().splitlines()
    assert len(lines) == len(written)
    for line in lines:
        json.loads(line, parse_constant=no_constant)


def test_a_line_has_the_documented_keys(tmp_path: Path) -> None:
    with Journal(tmp_path / "m.jsonl") as journal:
        journal.write(record(3))
    assert json.loads((tmp_path / "m.jsonl").read_text()) == {
        "step": 3,
        "loss": 2.5,
        "learning_rate": 1e-3,
        "grad_norm": 0.5,
        "tokens": 100,
        "tokens_per_second": 1234.5,
        "seconds": 0.25,
        "epoch": 0.5,
        "rows": 8,
        "phases": {"forward": 0.1},
        "breakdown": {"compute_seconds": 0.2, "stream_in_bytes": 7},
    }


def test_numbers_that_json_lacks_are_texts(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with Journal(path) as journal:
        for loss in (float("nan"), float("inf"), float("-inf")):
            journal.write(record(1, loss))
    losses = [
        json.loads(line, parse_constant=no_constant)["loss"]
        for line in path.read_text().splitlines()
    ]
    assert losses == ["NaN", "Infinity", "-Infinity"]
    assert [repr(r.loss) for r in read_journal(path)] == ["nan", "inf", "-inf"]


def test_a_line_is_in_the_file_before_the_next_step(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with Journal(path) as journal:
        journal.write(record(1))
        assert len(read_journal(path)) == 1


def test_any_cut_of_the_file_loses_at_most_the_cut_line(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with Journal(path) as journal:
        for step in (1, 2, 3):
            journal.write(record(step))
    raw = path.read_bytes()
    for length in range(len(raw) + 1):
        path.write_bytes(raw[:length])
        assert len(read_journal(path)) == raw[:length].count(b"\n")


def test_appending_after_a_cut_line_keeps_every_line_whole(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with Journal(path) as journal:
        journal.write(record(1))
        journal.write(record(2))
    path.write_bytes(path.read_bytes()[:-5])
    with Journal(path) as journal:
        journal.write(record(2))
    assert [one.step for one in read_journal(path)] == [1, 2]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "{}",
        '{"step": "one"}',
        '{"step": true}',
        '{"phases": 1}',
        '{"breakdown": {"idle_seconds": []}}',
        "\xff",
        "[" * 100_000,
    ],
)
def test_a_whole_line_that_is_no_record_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "m.jsonl"
    with Journal(path) as journal:
        journal.write(record(1))
    with path.open("a", encoding="latin-1") as file:
        file.write(line + "\n")
    with pytest.raises(CorruptError, match=r"m\.jsonl:2: not a step record"):
        read_journal(path)


def test_a_record_of_an_earlier_version_has_no_breakdown(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    written = record(1).to_json()
    del written["breakdown"]
    path.write_text(json.dumps(written) + "\n")
    assert read_journal(path)[0].breakdown == {}


def test_keys_of_a_later_version_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(json.dumps({**record(1).to_json(), "gpu_busy": 0.9}) + "\n")
    assert read_journal(path) == (record(1),)


def test_a_journal_that_cannot_be_opened_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be written"):
        Journal(tmp_path / "no-folder" / "m.jsonl")


def fill_disk(journal: Journal) -> None:
    with Path("/dev/full").open("wb") as full:
        os.dup2(full.fileno(), journal._file.fileno())


def test_a_full_disk_is_a_storage_error_when_the_journal_is_left_too(tmp_path: Path) -> None:
    """What the file still holds back fails again when it is closed."""
    with Journal(tmp_path / "m") as journal:
        fill_disk(journal)
        with pytest.raises(StorageError, match="No space left"):
            journal.write(record(1))


def test_a_patient_journal_keeps_its_lines_until_the_disk_has_room(tmp_path: Path) -> None:
    """`checkpoint.on_disk_full: skip` goes on without a save: its journal must not end it."""
    said: list[str] = []
    with Journal(tmp_path / "m", said.append) as journal:
        journal.write(record(1))
        fill_disk(journal)
        journal.write(record(2))
        journal.write(record(3))
        [line] = said
        assert line.endswith("No space left on device. Its lines are kept until there is room.")
        with (tmp_path / "m").open("ab") as room:
            os.dup2(room.fileno(), journal._file.fileno())
        journal.write(record(4))
        assert [one.step for one in read_journal(tmp_path / "m")] == [1, 2, 3, 4]
        fill_disk(journal)
        journal.write(record(5))
    assert said[1:] == [f"{tmp_path / 'm'}: no room to the end, its last line is lost."]
    assert [one.step for one in read_journal(tmp_path / "m")] == [1, 2, 3, 4]


def test_evaluations_stand_between_steps_and_each_reader_sees_its_own(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    evaluated = EvalRecord(1, math.inf, perplexity(math.inf), 5, 0.5)
    with Journal(path) as journal:
        journal.write(record(1))
        journal.write(evaluated)
        journal.write(record(2))
    assert [one.step for one in read_journal(path)] == [1, 2]
    assert read_evaluations(path) == (evaluated,)
    assert read_evaluations(tmp_path / "absent") == ()
    assert perplexity(1e6) == math.inf
    path.write_text(
        '{"step": 1, "eval_loss": "x", "eval_perplexity": 1, "eval_tokens": 1, "eval_seconds": 1}\n'
    )
    with pytest.raises(CorruptError, match=r":1: not a step record: eval_loss is not a number"):
        read_evaluations(path)
