"""Bounds of a step as laws: more work is never faster, a faster part never makes it slower."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.model.spec import ModelSpec
from megatrain_cli.pipeline.ops import Kind
from megatrain_cli.pipeline.schedule import build_schedule
from megatrain_cli.pipeline.shape import PipelineShape
from megatrain_cli.plan.cost import StepBounds, weights_in
from megatrain_cli.plan.machine import MachineSpec
from megatrain_cli.plan.rates import MachineRates, ThreadRate
from tests.plan.small import CPU, GPU, RATES, Sections, make_spec, plan_for, sections, specs

MEASURED = replace(GPU, rates=RATES)


def bounds_of(
    spec: ModelSpec, asked: Sections | None = None, machine: MachineSpec = MEASURED
) -> StepBounds:
    found = plan_for(spec, machine, asked).bounds
    assert found is not None
    return found


@given(specs, sections, st.sampled_from(["max_length", "micro_batch_size", "accumulation"]))
def test_more_tokens_are_never_faster(spec: ModelSpec, asked: Sections, what: str) -> None:
    less = bounds_of(spec, asked)
    section, key = {
        "max_length": ("data", "max_length"),
        "micro_batch_size": ("train", "micro_batch_size"),
        "accumulation": ("train", "gradient_accumulation_steps"),
    }[what]
    value = asked[section][key]
    assert isinstance(value, int)
    more = bounds_of(spec, {**asked, section: {**asked[section], key: value + 1}})
    assert more.tokens > less.tokens
    assert more.floor >= less.floor
    for name, seconds in less.parts.items():
        assert more.parts[name] >= seconds


@given(specs, sections)
def test_the_floor_is_the_largest_part_and_that_one_binds(spec: ModelSpec, asked: Sections) -> None:
    found = bounds_of(spec, asked)
    assert found.floor == max(found.parts.values())
    assert found.parts[found.binds] == found.floor


@given(specs, sections, st.floats(1, 10))
def test_a_faster_part_never_makes_a_step_slower(
    spec: ModelSpec, asked: Sections, factor: float
) -> None:
    assert RATES.link is not None
    assert RATES.compute is not None
    faster: list[MachineRates] = [
        replace(RATES, adam=tuple(replace(p, rate=p.rate * factor) for p in RATES.adam)),
        replace(RATES, link=tuple(replace(p, to_device=p.to_device * factor) for p in RATES.link)),
        replace(RATES, compute=replace(RATES.compute, layer=RATES.compute.layer * factor)),
    ]
    before = bounds_of(spec, asked)
    for rates in faster:
        assert bounds_of(spec, asked, replace(GPU, rates=rates)).floor <= before.floor


@given(st.integers(1, 6), st.integers(0, 6), st.booleans())
def test_a_kept_layer_is_not_computed_again(layers: int, kept: int, tied: bool) -> None:
    spec = make_spec(layers=layers, tied=tied)

    def compute(keep: int) -> float:
        asked: Sections = {"pipeline": {"activations": {"keep_layers": keep}}}
        found = bounds_of(spec, asked).compute
        assert found is not None
        return found

    tokens = bounds_of(spec).tokens
    assert compute(kept + 1) <= compute(kept)
    head = spec.embed.numel if tied else spec.head.numel  # its norm is too small to matter
    body = sum(layer.numel for layer in spec.decoder_layers)
    assert RATES.compute is not None
    speed = RATES.compute.of_layers(spec.hidden_size, compiled=True)
    assert compute(layers) == pytest.approx(6 * (body + head) * tokens / speed, rel=0.01)
    assert compute(0) == pytest.approx((8 * body + 6 * head) * tokens / speed, rel=0.01)


@given(st.integers(1, 6), st.integers(1, 8), st.booleans(), st.booleans())
def test_the_weights_that_cross_the_link_are_those_of_the_schedule(
    layers: int, slots: int, tied: bool, lookup: bool
) -> None:
    spec = replace(make_spec(layers=layers, tied=tied), lookup=lookup)
    shape = PipelineShape(
        num_layers=layers + 2,
        num_micro_batches=2,
        num_slots=slots,
        num_slabs=0,
        pieces=(1,) * (layers + 2),
        kept=frozenset(),
        offload=False,
        eager=False,
        tied=tied,
        lookup=lookup,
    )
    streamed = [op.layer for op in build_schedule(shape) if op.kind is Kind.STREAM_IN]
    moved = sum(spec.layers[layer].numel for layer in streamed)
    assert weights_in(spec, slots) == moved


def test_deferred_updates_follow_backward_and_eager_ones_run_beside_it() -> None:
    spec = make_spec()
    deferred = bounds_of(spec)
    assert deferred.backward is not None
    assert deferred.parts["backward + Adam"] == deferred.backward + deferred.adam
    asked: Sections = {"optimizer": {"update": "eager", "max_grad_norm": None}}
    eager = bounds_of(spec, asked)
    assert eager.parts["Adam"] == eager.adam == deferred.adam


def test_adam_is_bound_by_bytes_of_its_masters() -> None:
    spec = make_spec()
    split = bounds_of(spec, {"optimizer": {"master": "fp32_split"}}).adam
    bf16 = bounds_of(spec, {"optimizer": {"master": "bf16"}}).adam
    assert split == pytest.approx(spec.num_parameters / 2.5e9, rel=1e-9)  # 7 of 8 cores
    assert bf16 / split == pytest.approx(22 / 26)


def test_a_pageable_store_is_bound_by_packing_too() -> None:
    spec = make_spec()
    pinned = bounds_of(spec).link
    pageable = bounds_of(spec, {"store": {"memory": "pageable"}}).link
    assert pinned is not None
    assert pageable is not None
    assert pageable == pytest.approx(2 * weights_in(spec, 2) / 30e9)
    assert pageable > pinned


def test_without_compiling_the_eager_rate_counts() -> None:
    spec = make_spec()
    fast, slow = (
        bounds_of(spec, {"pipeline": {"compile": asked}}).compute for asked in ("auto", False)
    )
    assert fast is not None
    assert slow is not None
    compute = RATES.compute
    assert compute is not None
    width = spec.hidden_size
    rates = [compute.of_layers(width, compiled=compiled) for compiled in (True, False)]
    assert slow / fast == pytest.approx(rates[0] / rates[1])


def test_what_was_not_measured_is_left_out() -> None:
    spec = make_spec()
    rates = replace(RATES, link=None, compute=None, adam=(ThreadRate(1, 1e9),))
    found = bounds_of(spec, None, replace(GPU, rates=rates))
    assert found.parts == {"Adam": found.adam}
    on_cpu = bounds_of(spec, None, replace(CPU, rates=RATES))
    assert (on_cpu.link, on_cpu.compute) == (None, None)
    assert plan_for(spec, GPU).bounds is None


def test_the_summary_names_the_floor_and_what_binds_or_how_to_measure() -> None:
    spec = make_spec()
    shown = dict(plan_for(spec, MEASURED).summary)
    found = bounds_of(spec)
    assert shown["step takes"].startswith(f"at least {found.floor:.3g} s with full rows (")
    assert shown["step takes"].endswith(f"{found.binds} binds")
    assert shown["link"] == "copies from 4.00 MiB on reach 80% of its peak"
    assert "run `megatrain probe`" in dict(plan_for(spec, GPU).summary)["step takes"]
    asked: Sections = {"pipeline": {"target_pcie_utilization": 0.95}}
    assert "16.0 MiB on reach 95%" in dict(plan_for(spec, MEASURED, asked).summary)["link"]
