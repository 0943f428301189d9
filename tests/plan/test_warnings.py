"""Warnings: each is said where its cause is there, with numbers that are true, and nowhere else."""

import re
from dataclasses import replace

import pytest
import torch

from megatrain_cli.plan.machine import MachineSpec
from megatrain_cli.plan.plan import RunPlan
from megatrain_cli.plan.rates import LinkRate
from megatrain_cli.plan.verdict import DOES_NOT_FIT
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


# Updates on many threads while backward runs: nothing but link and compute may bind.
FAST = replace(GPU, rates=replace(RATES, adam=(replace(RATES.adam[0], rate=1e15),)))
EAGER: dict[str, object] = {"update": "eager", "max_grad_norm": None}


def link_bound(
    machine: MachineSpec, rows: int, accumulation: int, pipeline: dict[str, object] | None = None
) -> RunPlan:
    asked: Sections = {
        "data": {"max_length": 512},
        "train": {"micro_batch_size": rows, "gradient_accumulation_steps": accumulation},
        "optimizer": EAGER,
        "pipeline": pipeline or {},
    }
    return plan_for(make_spec(hidden=512, layers=24), machine, asked)


def hides_the_link(plan: RunPlan) -> bool:
    assert plan.bounds is not None
    assert plan.bounds.compute is not None
    assert plan.bounds.link is not None
    return plan.bounds.compute >= plan.bounds.link


def named(line: str) -> tuple[int, int]:
    """Tokens and micro-batches that would hide the link."""
    found = re.search(r": (\d+) tokens a step \(`.*_steps: (\d+)`\) would hide them", line)
    assert found is not None
    return int(found[1]), int(found[2])


# Bytes of the device: all layers are kept; ever fewer the more rows there are; none, and inputs
# wait on the host.
@pytest.mark.parametrize("device_bytes", [1 << 50, 6 << 30, 3 << 30, 2900 << 20])
@pytest.mark.parametrize(("rows", "accumulation"), [(1, 1), (1, 3), (2, 2), (4, 1)])
@pytest.mark.parametrize("link", [1.0, 0.2, 0.05])
def test_a_step_that_the_link_binds_names_the_fewest_tokens_that_hide_it(
    device_bytes: int, rows: int, accumulation: int, link: float
) -> None:
    points = tuple(
        LinkRate(p.num_bytes, link * p.to_device, link * p.to_host, link * p.both_ways)
        for p in RATES.link or ()
    )
    assert FAST.rates is not None
    machine = replace(FAST, device_bytes=device_bytes, rates=replace(FAST.rates, link=points))
    plan = link_bound(machine, rows, accumulation)
    assert plan.verdict != DOES_NOT_FIT
    (line,) = [line for line in plan.warnings if "over the link" in line]
    tokens, needed = named(line)
    assert tokens == needed * rows * 512
    assert f" this step has {accumulation * rows * 512}" in line
    enough = link_bound(machine, rows, needed)
    assert hides_the_link(enough)
    assert not any("over the link" in line for line in enough.warnings)
    # A few more than the fewest may be named where they pass together: see `fewest_that_hide`.
    less = needed - 1 - min(3, needed // 16)
    assert not hides_the_link(link_bound(machine, rows, less))


def test_tokens_that_would_hide_the_link_and_do_not_fit_are_no_advice() -> None:
    short = replace(FAST, device_bytes=2100 << 20)
    plan = link_bound(short, 1, 1, {"activations": "keep"})
    assert plan.verdict != DOES_NOT_FIT
    (line,) = plan.warnings
    assert re.search(r"s: \d+ tokens a step would hide them and do not fit here, and this", line)


def test_a_plan_that_the_link_binds_reads_so() -> None:
    (line,) = link_bound(FAST, 1, 1).warnings
    assert line == (
        "weights and gradients take 0.00359 s over the link and compute takes 0.000369 s: 5120 "
        "tokens a step (`train.gradient_accumulation_steps: 10`) would hide them, and this step "
        "has 512"
    )


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
