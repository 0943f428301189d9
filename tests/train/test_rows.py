"""What a run of compiled rows pays for one row that is much longer than the others."""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from megatrain_cli.config.load import load_config
from megatrain_cli.plan.plan import RunPlan
from megatrain_cli.report.console import RunConsole
from megatrain_cli.train import preparation
from megatrain_cli.train.session import train as run_training
from megatrain_cli.train.warm_up import warm_up
from tests.train.workspace import make_workspace, one_thread, start


def as_compiled(plan: RunPlan) -> RunPlan:
    """On the CPU: eager functions, but rows of one length."""
    return replace(plan, decisions=replace(plan.decisions, compiled=True))


def add_long_row(config: Path) -> None:
    messages = [
        {"role": "user", "content": "long"},
        {"role": "assistant", "content": "star " * 60},
    ]
    with (config.parent / "train.jsonl").open("a") as file:
        file.write(json.dumps({"messages": messages}) + "\n")


@pytest.mark.parametrize("long", [False, True])
def test_padding_is_counted_and_said_where_it_is_most_of_the_work(
    long: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = {"max_steps": None, "num_epochs": 1, "micro_batch_size": 1}
    config = make_workspace(tmp_path, train=train, data={"max_length": 512})
    settings = tmp_path / "model" / "config.json"
    values = json.loads(settings.read_text())
    settings.write_text(json.dumps({**values, "max_position_embeddings": 512}))
    if long:
        add_long_row(config)
    with start(config, adjust=as_compiled) as run:
        steps = [run.rows.of_step(i) for i in range(run.rows.total_steps)]
        positions = sum(mb.input_ids.size for step in steps for mb in step.micro_batches)
        length = run.engine.plan.decisions.max_length
        padding = run.rows.padding
        assert padding == pytest.approx(1 - len(run.rows.examples.tokens) / positions)
    assert (padding > preparation.NOTED_PADDING) is long

    real: Callable[..., tuple[RunPlan, object]] = warm_up

    def compiled(*args: object) -> tuple[RunPlan, object]:
        plan, functions = real(*args)
        return as_compiled(plan), functions

    monkeypatch.setattr(preparation, "warm_up", compiled)
    said = io.StringIO()
    with one_thread():
        run_training(load_config(config, []), RunConsole(Console(file=said, width=1000)))
    text = f"{padding:.0%} of the layers' work is on padding"
    assert (text in said.getvalue()) is long
    assert not long or f"{length} tokens. A lower `data.max_length`" in said.getvalue()
