"""What does not belong together is refused before anything runs; a refused page lock is not."""

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

import megatrain_cli.train.assemble as assemble_module
from megatrain_cli.config.load import LoadedConfig, load_config
from megatrain_cli.errors import DeviceError, ModelError, PlanError
from megatrain_cli.model.functions import Functions, eager_functions
from megatrain_cli.model.skeleton import Skeleton
from megatrain_cli.model.template import Head
from megatrain_cli.pipeline.slabs import SlabPool
from megatrain_cli.plan.plan import RunPlan
from megatrain_cli.report.console import RunConsole
from megatrain_cli.store.load import LayerSource, fill_store
from megatrain_cli.store.master import MasterStore
from megatrain_cli.train.assemble import assemble, prepare, schedule_of
from megatrain_cli.train.loop import Run
from megatrain_cli.train.model_folder import check_examples
from megatrain_cli.train.rows import load_rows
from megatrain_cli.train.warm_up import warm_up
from tests.families import make_tiny
from tests.store.cudart import fake_driver
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


# The tiny model's tiles: embedding, three layers, head.
TILES = range(1, 6)


def beside_a_gpu(config: Path, memory: str) -> tuple[LoadedConfig, Skeleton, RunPlan, Functions]:
    """What would be prepared on a machine whose driver can page-lock memory."""
    loaded = load_config(config, [f"store.memory={memory}"])
    skeleton, plan = prepare(loaded)
    return (
        loaded,
        skeleton,
        replace(plan, decisions=replace(plan.decisions, pin_store=True, num_slabs=0)),
        eager_functions(Head(skeleton)),
    )


@pytest.mark.parametrize("refuse", TILES)
def test_a_page_lock_refused_at_any_tile_means_ordinary_memory_and_is_said(
    refuse: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cudart = fake_driver(monkeypatch, refuse)
    loaded, skeleton, plan, functions = beside_a_gpu(make_workspace(tmp_path), "auto")
    said = io.StringIO()
    engine = assemble(loaded, skeleton, plan, functions, RunConsole(Console(file=said, width=1000)))
    assert cudart.calls == refuse
    assert cudart.locked == {}
    assert cudart.last_error == engine.store.locked_bytes == 0
    assert not engine.plan.decisions.pin_store
    assert engine.plan.decisions.num_slabs == 7  # one a piece
    name = skeleton.layouts[refuse - 1].layer.name
    assert f"{name}: The driver refused to page-lock" in said.getvalue()
    assert "Going on with ordinary memory" in said.getvalue()
    engine.close()


@pytest.mark.parametrize("refuse", TILES)
def test_a_page_lock_refused_at_any_tile_ends_the_run_where_it_was_asked_for(
    refuse: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cudart = fake_driver(monkeypatch, refuse)
    prepared = beside_a_gpu(make_workspace(tmp_path), "pinned")
    with pytest.raises(DeviceError, match="The driver refused"):
        assemble(*prepared, RunConsole(Console(file=io.StringIO())))
    assert cudart.locked == {}
    assert cudart.last_error == 0


def test_a_page_lock_refused_where_ordinary_memory_does_not_fit_says_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cudart = fake_driver(monkeypatch, refuse=2)
    loaded, skeleton, plan, functions = beside_a_gpu(make_workspace(tmp_path), "auto")
    plan = replace(plan, machine=replace(plan.machine, host_bytes=1))
    said = io.StringIO()
    with pytest.raises(PlanError, match=r"(?s)^layer-00000: The driver refused.*are missing"):
        assemble(loaded, skeleton, plan, functions, RunConsole(Console(file=said)))
    assert said.getvalue() == ""
    assert cudart.locked == {}


def test_a_store_that_is_page_locked_is_unlocked_when_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cudart = fake_driver(monkeypatch)
    prepared = beside_a_gpu(make_workspace(tmp_path), "auto")
    engine = assemble(*prepared, RunConsole(Console(file=io.StringIO())))
    assert sum(cudart.locked.values()) == engine.store.locked_bytes > 0
    assert len(cudart.locked) == len(TILES)
    assert engine.plan.decisions.pin_store
    engine.close()
    assert cudart.locked == {}


@pytest.mark.parametrize("part", ["Moves", "Compute", "Executor"])
def test_slabs_are_unlocked_when_a_later_part_finds_no_room(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cudart = fake_driver(monkeypatch)
    most = 0

    def no_room(*_: object, **__: object) -> None:
        nonlocal most
        most = len(cudart.locked)
        raise torch.OutOfMemoryError("no room")

    def pinned(count: int, numel: int, dtype: torch.dtype, *, pin: bool) -> SlabPool:
        assert not pin  # on the CPU; beside a GPU they are
        return SlabPool(count, numel, dtype, pin=True)

    monkeypatch.setattr(assemble_module, "SlabPool", pinned)
    monkeypatch.setattr(assemble_module, part, no_room)
    before = threading.active_count()
    with pytest.raises(torch.OutOfMemoryError), start(make_workspace(tmp_path)):
        pass
    assert most == 7 + 1  # and the norms beside them
    assert cudart.locked == {}
    assert threading.active_count() == before


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


def test_on_the_cpu_a_store_is_filled_from_a_lean_heap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    @contextmanager
    def lean() -> Iterator[None]:
        done.append("lean")
        yield
        done.append("settled")

    def noted(store: MasterStore, source: LayerSource) -> None:
        done.append("filled")
        fill_store(store, source)

    monkeypatch.setattr(assemble_module, "lean_heap", lean)
    monkeypatch.setattr(assemble_module, "fill_store", noted)
    with start(make_workspace(tmp_path)):
        assert done == ["lean", "filled", "settled"]


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
