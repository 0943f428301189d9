"""What does not belong together is refused before anything runs; a refused page lock is not."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from megatrain_cli.config.load import load_config
from megatrain_cli.errors import DeviceError, ModelError
from megatrain_cli.model.functions import eager_functions
from megatrain_cli.model.template import Head
from megatrain_cli.report.console import RunConsole
from megatrain_cli.store.master import MasterStore
from megatrain_cli.train.assemble import assemble, check_examples, prepare, schedule_of
from megatrain_cli.train.loop import Run
from megatrain_cli.train.rows import load_rows
from megatrain_cli.train.warm_up import warm_up
from tests.families import make_tiny
from tests.train.workspace import digest, make_workspace, one_thread, start


def test_rows_longer_than_the_models_positions_are_refused(tmp_path: Path) -> None:
    """By the rows there are: `data.max_length` may allow more than any row has."""
    loaded = load_config(make_workspace(tmp_path, model={"max_position_embeddings": 16}))
    skeleton, plan = prepare(loaded)
    rows = load_rows(loaded.config, plan.decisions)
    with pytest.raises(ModelError, match=r"has \d+ tokens and .* has 16 positions.*max_length: 16"):
        check_examples(rows.examples, skeleton, tmp_path / "model")


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    loaded = load_config(make_workspace(tmp_path, model={"vocab_size": 200}))
    skeleton, plan = prepare(loaded)
    rows = load_rows(loaded.config, plan.decisions)
    with pytest.raises(ModelError, match=r"gives token 257 and the model's vocabulary has 200"):
        check_examples(rows.examples, skeleton, tmp_path / "model")


def test_the_schedule_of_a_plan_has_the_planned_layers_and_micro_batches(tmp_path: Path) -> None:
    plan = prepare(load_config(make_workspace(tmp_path)))[1]
    ops = schedule_of(plan)
    assert {op.layer for op in ops} == {-1, *range(5)}
    assert {op.micro_batch for op in ops} == {None, *range(4)}


def refuse(store: MasterStore) -> None:
    raise DeviceError("embed: the driver refused to lock 4 KiB.")


@pytest.mark.parametrize("memory", ["auto", "pinned"])
def test_a_refused_page_lock_means_ordinary_memory_unless_pinned_was_asked_for(
    memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MasterStore, "register", refuse)
    loaded = load_config(make_workspace(tmp_path), [f"store.memory={memory}"])
    skeleton, plan = prepare(loaded)
    functions = eager_functions(Head(skeleton))
    # As it would be decided beside a GPU.
    plan = replace(plan, decisions=replace(plan.decisions, pin_store=True, num_slabs=0))
    said = io.StringIO()
    console = RunConsole(Console(file=said))
    if memory == "pinned":
        with pytest.raises(DeviceError, match="the driver refused"):
            assemble(loaded, skeleton, plan, functions, console)
        return
    engine = assemble(loaded, skeleton, plan, functions, console)
    assert not engine.plan.decisions.pin_store
    assert engine.plan.decisions.num_slabs == 12
    assert "the driver refused" in said.getvalue()
    assert "Going on with ordinary memory" in said.getvalue()
    engine.close()


@pytest.mark.parametrize(
    ("kind", "old"),
    [
        ("llama", "model.layers.{}.self_attn.rotary_emb.inv_freq"),
        ("gpt2", "h.{}.attn.bias"),
        ("gpt2", "transformer.h.{}.attn.masked_bias"),
    ],
)
def test_buffers_that_older_transformers_stored_are_no_parameters(
    kind: str, old: str, tmp_path: Path
) -> None:
    config = make_workspace(tmp_path, kind)
    file = tmp_path / "model" / "model.safetensors"
    save_file(load_file(file) | {old.format(i): torch.ones(2) for i in range(3)}, file)
    with start(config) as run:
        found = run.by_name(lambda tile: tile.weights)
    assert found.keys() == dict(make_tiny(kind, tied=False, layers=3).named_parameters()).keys()


def test_an_engine_over_the_store_of_another_makes_the_same_steps(tmp_path: Path) -> None:
    """What an engine leaves is whole: the next one needs nothing but the store."""
    with start(make_workspace(tmp_path / "whole")) as whole:
        expected = [(record.loss, record.grad_norm) for record in whole.steps()]
        whole.engine.lanes.drain()
        weights = digest(whole.engine.store)
    loaded = load_config(make_workspace(tmp_path / "parts"))
    skeleton, plan = prepare(loaded)
    rows = load_rows(loaded.config, plan.decisions)
    with RunConsole(Console(file=io.StringIO())) as console, one_thread():
        plan, functions = warm_up(loaded.config, skeleton, plan, rows.longest, console)
        store = assemble(loaded, skeleton, plan, functions, console).leave_store()
        before = digest(store)
        engine = assemble(loaded, skeleton, plan, functions, console, store)
        assert digest(store) == before
        found = [(record.loss, record.grad_norm) for record in Run(loaded, engine, rows).steps()]
        engine.lanes.drain()
        assert (found, digest(store)) == (expected, weights)
        engine.close()
