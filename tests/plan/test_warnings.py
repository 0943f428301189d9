"""Warnings: each is said where its cause is there, with numbers that are true, and nowhere else."""

import re
from dataclasses import replace

import pytest
import torch

from megatrain_cli.plan.warnings import WEIGHT_DEVIATION, vanishing_share
from tests.plan.small import CPU, GPU, RATES, Sections, make_spec, plan_for


@pytest.mark.parametrize("learning_rate", [1e-6, 1e-5, 3e-5, 1e-4, 7e-4])
def test_the_share_of_lost_updates_is_that_of_bf16_weights(learning_rate: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = (torch.randn(400_000, generator=generator) * WEIGHT_DEVIATION).bfloat16()
    moved = (weights.float() - learning_rate).bfloat16()
    lost = (moved == weights).double().mean().item()
    assert vanishing_share(learning_rate) == pytest.approx(lost, abs=0.01)


def test_fewer_updates_are_lost_at_a_higher_rate() -> None:
    shares = [vanishing_share(2.0**exponent) for exponent in range(-24, 2)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.99
    assert shares[-1] == 0


@pytest.mark.parametrize(
    ("master", "rate", "warned"),
    [
        ("bf16", 1e-5, True),
        ("bf16", 0.0, False),
        ("bf16", 0.1, False),
        ("bf16_stochastic", 1e-5, False),
        ("fp32_split", 1e-5, False),
    ],
)
def test_pure_bf16_masters_are_warned_of_where_updates_vanish(
    master: str, rate: float, warned: bool
) -> None:
    asked: Sections = {"optimizer": {"master": master, "learning_rate": rate}}
    warnings = plan_for(make_spec(), CPU, asked).warnings
    assert any("away in about 85% of the weights" in line for line in warnings) is warned
    assert len(warnings) == warned


def test_a_step_bound_by_the_link_names_the_tokens_that_hide_it() -> None:
    spec = make_spec(hidden=512)
    machine = replace(GPU, rates=RATES)
    # Updates during backward on many threads: nothing but link and compute may bind.
    asked: Sections = {
        "data": {"max_length": 64},
        "train": {"micro_batch_size": 1},
        "optimizer": {"update": "eager", "max_grad_norm": None},
    }
    fast = replace(
        machine,
        rates=replace(RATES, adam=(replace(RATES.adam[0], rate=1e15),)),
    )
    (line,) = plan_for(spec, fast, asked).warnings
    found = re.search(r"about (\d+) tokens a step would hide them, and this step has 64", line)
    assert found is not None
    rows = -(-int(found[1]) // 64)
    asked["train"]["micro_batch_size"] = rows
    assert plan_for(spec, fast, asked).warnings == ()
    asked["train"]["micro_batch_size"] = rows // 2
    assert plan_for(spec, fast, asked).warnings


def test_a_lone_slab_is_warned_of() -> None:
    asked: Sections = {"pipeline": {"grad_slabs": 1}}
    (line,) = plan_for(make_spec(), CPU, asked).warnings
    assert "grad_slabs: 1" in line
    assert plan_for(make_spec(), CPU, {"pipeline": {"grad_slabs": 2}}).warnings == ()


def test_slabs_that_a_page_locked_store_does_not_need_are_said() -> None:
    """Gradients go straight into its tiles."""
    for slabs in (1, 20):
        asked: Sections = {"pipeline": {"grad_slabs": slabs}}
        (line,) = plan_for(make_spec(), GPU, asked).warnings
        assert f"`pipeline.grad_slabs: {slabs}` has no effect" in line
        pageable: Sections = {**asked, "store": {"memory": "pageable"}}
        assert not any("no effect" in w for w in plan_for(make_spec(), GPU, pageable).warnings)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("store", "memory", "pinned"),
        ("train", "deterministic", True),
        ("pipeline", "target_pcie_utilization", 0.5),
    ],
)
def test_what_a_machine_without_a_gpu_cannot_heed_is_said(
    section: str, key: str, value: object
) -> None:
    asked: Sections = {section: {key: value}}
    (line,) = plan_for(make_spec(), CPU, asked).warnings
    assert f"`{section}.{key}` has no effect: there is no GPU" in line
    assert plan_for(make_spec(), GPU, asked).warnings == ()
    # A config that names the CPU has said it already, as it was read.
    named: Sections = {**asked, "pipeline": {**asked.get("pipeline", {}), "device": "cpu"}}
    assert plan_for(make_spec(), CPU, named).warnings == ()


@pytest.mark.parametrize(("asked", "warned"), [(5, True), (4, False), (0, False)])
def test_more_kept_layers_than_the_model_has_are_said(asked: int, warned: bool) -> None:
    config: Sections = {"pipeline": {"activations": {"keep_layers": asked}}}
    plan = plan_for(make_spec(layers=4), CPU, config)
    assert plan.decisions.keep_layers == min(asked, 4)
    said = "`pipeline.activations.keep_layers: 5` is more than the model's 4 layers: all of them"
    assert any(said in line for line in plan.warnings) is warned


def test_more_threads_than_cores_are_said() -> None:
    cores = CPU.num_cores
    (line,) = plan_for(make_spec(), CPU, {"optimizer": {"threads": cores + 1}}).warnings
    assert f"`optimizer.threads: {cores + 1}` is more than the {cores} usable cores" in line
    assert plan_for(make_spec(), CPU, {"optimizer": {"threads": cores}}).warnings == ()
