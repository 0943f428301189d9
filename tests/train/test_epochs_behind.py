"""Fewer passes over the data than a run has made already."""

from pathlib import Path

import pytest

from megatrain_cli.config.load import load_config
from megatrain_cli.errors import ConfigError
from megatrain_cli.train.assemble import prepare
from megatrain_cli.train.position import Position
from megatrain_cli.train.rows import load_rows
from tests.train.workspace import make_workspace


def test_an_end_that_lies_behind_is_refused_and_one_that_is_reached_is_not(tmp_path: Path) -> None:
    config = make_workspace(tmp_path, rows=12, train={"max_steps": None, "num_epochs": 1})
    loaded = load_config(config)
    decisions = prepare(loaded)[1].decisions
    assert load_rows(loaded.config, decisions, Position(3, 12)).total_steps == 3
    with pytest.raises(ConfigError, match=r"num_epochs: .* has taken 13 rows already, beyond 12"):
        load_rows(loaded.config, decisions, Position(4, 13))
