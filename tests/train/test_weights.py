"""Weights in a config decide how often a run draws the rows of each source."""

from collections import Counter
from pathlib import Path

from megatrain_cli.config.load import load_config
from megatrain_cli.train.assemble import prepare
from megatrain_cli.train.rows import load_rows
from tests.train.workspace import make_workspace


def test_a_run_draws_its_sources_as_they_are_weighted(tmp_path: Path) -> None:
    config = make_workspace(tmp_path, rows=8)
    lines = (tmp_path / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "a.jsonl").write_text("".join(lines[:6]))
    (tmp_path / "b.jsonl").write_text("".join(lines[6:]))
    train = "data.train=[{path: a.jsonl, weight: 0.5}, {path: b.jsonl, weight: 2}]"
    length = ["train.num_epochs=2", "train.max_steps=null"]
    loaded = load_config(config, [train, *length])
    rows = load_rows(loaded.config, prepare(loaded)[1].decisions)
    assert (rows.rows_per_epoch, rows.order.split("+")[1]) == (7, "passes-v1")
    assert rows.total_steps * rows.rows_per_step >= 14
    ids = [i for step in range(rows.total_steps) for i in rows.ids_of_step(step)]
    assert Counter(ids) == {**dict.fromkeys(range(6), 1), 6: 4, 7: 4}
    alike = load_config(config, ["data.train=[{path: a.jsonl, weight: 1}, b.jsonl]", *length])
    plain = load_rows(alike.config, prepare(alike)[1].decisions)
    assert "+" not in plain.order
