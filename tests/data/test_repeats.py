"""Rows that are read more than once are told, whatever their file is called; none is refused."""

import json
import os
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from megatrain_cli.cli.app import app
from megatrain_cli.config.load import load_config
from megatrain_cli.data.load import load_data
from megatrain_cli.data.repeats import ReadFile, repeated, trained_on
from tests.train.live import train_here
from tests.train.workspace import make_workspace

read = st.builds(
    ReadFile, st.tuples(st.sampled_from("abcdef")), st.sampled_from("uvw"), st.integers(0, 9)
)


@given(st.lists(read))
def test_each_content_that_is_read_again_is_counted_with_all_its_rows(
    files: list[ReadFile],
) -> None:
    times = Counter(file.content for file in files)
    again = [content for content, count in times.items() if count > 1]
    rows = [sum(file.num_rows for file in files if file.content == one) for one in again]
    lines = repeated(files, "data.train", "Name it once.")
    found = [re.search(r"(\d+) times for data\.train, which makes (\d+) rows?\.", x) for x in lines]
    told = [(int(one[1]), int(one[2])) for one in found if one]
    assert told == list(zip([times[one] for one in again], rows, strict=True))[:3]
    assert len(lines) == min(len(again), 4)
    if len(again) > 3:
        assert lines[3].endswith(f" make {sum(rows)} row{'s' * (sum(rows) != 1)}")


@given(st.lists(read), st.sets(st.tuples(st.sampled_from("abcdef"))))
def test_what_is_trained_on_is_told_with_its_share(
    files: list[ReadFile], trained: set[tuple[str]]
) -> None:
    lines = trained_on(files, trained)
    assert len(lines) == sum(file.content in trained for file in files)
    total = sum(file.num_rows for file in files)
    assert all(f" of {total} row" in line for line in lines)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 rows, under several names."""
    folder = tmp_path_factory.mktemp("repeats")
    config = make_workspace(folder, train={"max_steps": 1})
    (folder / "link.jsonl").symlink_to("train.jsonl")
    (folder / "copy.jsonl").write_bytes((folder / "train.jsonl").read_bytes())
    (folder / "other.jsonl").write_bytes((folder / "train.jsonl").read_bytes() + b"\n")
    (folder / "all").mkdir()
    os.link(folder / "train.jsonl", folder / "all" / "train.jsonl")
    return config


@pytest.mark.parametrize("second", ["train.jsonl", "./train.jsonl", "FULL", "link.jsonl", "all"])
def test_every_spelling_of_a_path_is_seen(config: Path, second: str) -> None:
    full = str(config.parent / "train.jsonl")
    second = full if second == "FULL" else second
    sources = json.dumps(["train.jsonl", "other.jsonl", {"path": second, "max_rows": 5}])
    found = load_data(load_config(config, [f"data.train={sources}"]).config)
    [line] = found.repeats
    assert line.endswith(
        " read 2 times for data.train, which makes 17 rows. Name it once, or once with a `weight`"
    )
    assert found.prepared.summary.notes == (line,)
    assert found.prepared.summary.num_used == 29


def said_by(*words: str | Path) -> str:
    """All that a command says, in one line."""
    done = CliRunner().invoke(app, list(map(str, words)))
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


def test_one_file_given_twice_is_said_by_each_command(config: Path) -> None:
    twice = "data.train=[train.jsonl,./train.jsonl]"
    line = "is read 2 times for data.train, which makes 24 rows. Name it once, or once with a"
    for command in (("plan",), ("data", "preview"), ("train", "--dry-run")):
        assert said_by(*command, config, twice).count(line) == 1
    assert train_here(config, twice).count(line) == 1


def test_a_file_of_both_is_said_by_each_command(config: Path) -> None:
    both = "data.eval=[copy.jsonl,other.jsonl]"
    line = "copy.jsonl is a file of data.train too: 12 of 24 rows are trained on, so their loss"
    for command in (("plan",), ("data", "preview"), ("data", "preview", "--json")):
        assert said_by(*command, config, both).count(line) == 1
