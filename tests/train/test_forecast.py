"""Forecasts against steps that were measured on H200 machines, 2026-11-29 and 30."""

from dataclasses import astuple, replace
from functools import cache
from typing import Any

import pytest
import torch
from transformers import Qwen2Config

from megatrain_cli.config.schema import CheckpointSection, TrainConfig
from megatrain_cli.model.discover import make_skeleton
from megatrain_cli.model.skeleton import Skeleton
from megatrain_cli.plan.cost import step_bounds
from megatrain_cli.plan.machine import MachineSpec
from megatrain_cli.plan.plan import RunPlan, make_plan
from megatrain_cli.plan.rates import (
    Beside,
    ComputeRates,
    DiskRates,
    IssueCost,
    IssueTimes,
    LinkRate,
    MachineRates,
    ThreadRate,
)
from megatrain_cli.train.forecast import Forecast, forecast
from tests.plan.small import GPU, make_spec, plan_for

SIZES: dict[str, dict[str, Any]] = {
    "0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "3b": {
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
}
SAVES = CheckpointSection(save_steps=100)

EAGER: dict[str, Any] = {
    "optimizer": {"update": "eager", "max_grad_norm": None},
    "pipeline": {"staging_buffers": 36, "grad_slabs": 8},
}
PAGEABLE: dict[str, Any] = {"store": {"memory": "pageable"}}


def machine(adam: float) -> MachineSpec:
    """The probe's figures of 2026-11-29, with the rate of Adam that the run itself had."""
    link = (
        LinkRate(1 << 20, 47.0e9, 50.5e9, 30.6e9),
        LinkRate(4 << 20, 51.4e9, 53.4e9, 47.2e9),
        LinkRate(16 << 20, 53.4e9, 54.0e9, 48.8e9),
        LinkRate(64 << 20, 54.6e9, 54.3e9, 49.0e9),
        LinkRate(256 << 20, 55.1e9, 53.0e9, 49.6e9),
    )
    rates = MachineRates(
        link=link,
        copy=(ThreadRate(1, 9.7e9), ThreadRate(4, 19.8e9), ThreadRate(16, 44.4e9)),
        copy_to_pinned=(ThreadRate(1, 10.1e9), ThreadRate(4, 19.4e9), ThreadRate(16, 44e9)),
        read=(ThreadRate(1, 10.7e9), ThreadRate(16, 79.6e9)),
        adam=(ThreadRate(16, adam),),
        lockable_bytes=64 << 30,
        lockable_refused=False,
        compute=ComputeRates(780e12, 400e12, 563e12),
        disk=DiskRates(2.96e9, 1.82e9, direct=True),
    )
    return MachineSpec(
        125 << 30, "MemAvailable", 16, "cuda:0", "NVIDIA H200", 139 << 30, rates=rates
    )


# Of another machine's probe, 2026-11-30.
BUSY: dict[str, Any] = {
    "copy": (ThreadRate(1, 10.3e9), ThreadRate(4, 19.4e9), ThreadRate(8, 32.8e9)),
    "copy_to_pinned": (ThreadRate(1, 10.7e9), ThreadRate(4, 22.1e9), ThreadRate(8, 33e9)),
    "compute": ComputeRates(
        784e12, 401e12, 546e12, IssueCost(1.63e-3, 2.18e-3), IssueCost(0.92e-3, 1.86e-3)
    ),
    "beside": Beside(13.2e9, IssueTimes(1.95, 1.95), IssueTimes(1.4, 1.6)),
}


# Of a third one, 2026-12-01; issuing as a script measured it there, on average over 40 layers.
THIRD: dict[str, Any] = {
    "copy": (ThreadRate(1, 7.74e9), ThreadRate(4, 14.9e9), ThreadRate(8, 27.2e9)),
    "copy_to_pinned": (ThreadRate(1, 9.81e9), ThreadRate(4, 20.8e9), ThreadRate(8, 34.6e9)),
    "compute": ComputeRates(
        779e12, 400e12, 551e12, IssueCost(1.56e-3, 2.2e-3), IssueCost(1.06e-3, 1.61e-3)
    ),
    "beside": Beside(11.6e9, IssueTimes(2.15, 2.9), IssueTimes(1.4, 1.6)),
}
SMALL_EAGER: dict[str, Any] = EAGER | {"pipeline": {"grad_slabs": 8}}


@cache
def skeleton_of(size: str) -> Skeleton:
    config = Qwen2Config(**SIZES[size], max_position_embeddings=131072, use_sliding_window=False)
    return make_skeleton(config, dtype=torch.bfloat16, attention="sdpa")


def planned(
    size: str,
    rows: int,
    length: int,
    adam: float,
    asked: dict[str, Any],
    more: dict[str, Any] | None = None,
) -> RunPlan:
    sections: dict[str, dict[str, Any]] = {
        "model": {"path": "/model"},
        "data": {"train": "/rows", "max_length": length},
        "train": {"output_dir": "/run", "max_steps": 1000, "micro_batch_size": rows},
        "checkpoint": {"save_steps": 100},
    }
    for section, values in asked.items():
        sections.setdefault(section, {}).update(values)
    skeleton = skeleton_of(size)
    config = TrainConfig.model_validate(sections)
    here = machine(adam)
    assert here.rates is not None
    here = replace(here, rates=replace(here.rates, **(more or {})))
    return make_plan(config, skeleton.spec, skeleton.layouts, here)


def of(size: str, plan: RunPlan) -> Forecast:
    found = forecast(plan, skeleton_of(size).spec, 1000, SAVES)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("size", "rows", "length", "adam", "asked", "measured"),
    [
        ("3b", 8, 1024, 5.15e9, {}, 0.809),
        ("3b", 32, 1024, 5.29e9, {}, 1.352),
        ("3b", 64, 1024, 4.60e9, {}, 2.466),
        ("3b", 8, 1024, 5.00e9, EAGER, 0.769),
        ("7b", 8, 1024, 5.40e9, {}, 1.851),
        ("7b", 32, 1024, 5.74e9, {}, 3.007),
        ("7b", 64, 1024, 5.40e9, {}, 5.491),
        ("7b", 1, 131072, 2.50e9, {}, 38.88),
    ],
)
def test_a_step_is_forecast_within_15_percent(
    size: str, rows: int, length: int, adam: float, asked: dict[str, Any], measured: float
) -> None:
    found = of(size, planned(size, rows, length, adam, asked))
    assert found.step_seconds == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(
    ("rates", "size", "rows", "adam", "asked", "measured"),
    [
        (BUSY, "0.5b", 8, 4.75e9, {}, 0.179),
        (BUSY, "0.5b", 8, 3.74e9, SMALL_EAGER, 0.222),
        (BUSY, "0.5b", 8, 3.61e9, PAGEABLE, 0.283),
        (BUSY, "0.5b", 32, 3.95e9, PAGEABLE, 0.342),
        (BUSY, "3b", 8, 3.69e9, PAGEABLE, 1.318),
        (BUSY, "3b", 32, 3.87e9, PAGEABLE, 1.619),
        (THIRD, "0.5b", 8, 4.39e9, {}, 0.198),
        (THIRD, "0.5b", 8, 3.62e9, SMALL_EAGER, 0.231),
        (THIRD, "0.5b", 8, 3.92e9, PAGEABLE, 0.288),
        (THIRD, "0.5b", 8, 3.17e9, SMALL_EAGER | PAGEABLE, 0.299),
    ],
)
def test_what_runs_beside_the_optimizer_is_forecast_within_15_percent(
    rates: dict[str, Any],
    size: str,
    rows: int,
    adam: float,
    asked: dict[str, Any],
    measured: float,
) -> None:
    found = of(size, planned(size, rows, 1024, adam, asked, rates))
    assert found.step_seconds == pytest.approx(measured, rel=0.15)


def test_a_small_eager_step_is_forecast_shorter_without_what_runs_beside_the_optimizer() -> None:
    alone = planned("0.5b", 8, 1024, 3.62e9, SMALL_EAGER, THIRD | {"beside": None})
    beside = planned("0.5b", 8, 1024, 3.62e9, SMALL_EAGER, THIRD)
    assert of("0.5b", alone).step_seconds < 0.9 * of("0.5b", beside).step_seconds


PARTS = ["issue", "optimizer", "copies", "copy_to_pinned", "adam", "copy", "link", "layer"]


def worsened(rates: MachineRates, part: str, by: float) -> MachineRates:
    """The rates with one part that takes `by` times as long."""
    compute, beside = rates.compute, rates.beside
    assert compute is not None
    assert beside is not None
    assert rates.link is not None
    match part:
        case "issue":
            assert compute.compiled_issue is not None
            more = IssueCost(*(by * seconds for seconds in astuple(compute.compiled_issue)))
            return replace(rates, compute=replace(compute, compiled_issue=more))
        case "optimizer":
            longer = IssueTimes(*(by * times for times in astuple(beside.optimizer)))
            return replace(rates, beside=replace(beside, optimizer=longer))
        case "copies":
            longer = IssueTimes(*(by * times for times in astuple(beside.copies)))
            return replace(rates, beside=replace(beside, copies=longer))
        case "copy_to_pinned":
            slower = replace(beside, copy_to_pinned=beside.copy_to_pinned / by)
            return replace(rates, beside=slower)
        case "adam":
            return replace(rates, adam=tuple(replace(r, rate=r.rate / by) for r in rates.adam))
        case "copy":
            return replace(rates, copy=tuple(replace(r, rate=r.rate / by) for r in rates.copy))
        case "link":
            slow = (LinkRate(p, *(r / by for r in rest)) for p, *rest in map(astuple, rates.link))
            return replace(rates, link=tuple(slow))
        case _:
            assert compute.compiled_layer is not None
            slower_layer = replace(
                compute,
                matmul=compute.matmul / by,
                layer=compute.layer / by,
                compiled_layer=compute.compiled_layer / by,
            )
            return replace(rates, compute=slower_layer)


@pytest.mark.parametrize("by", [1.05, 1.5, 20])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("asked", [{}, EAGER, PAGEABLE, EAGER | PAGEABLE])
def test_what_takes_longer_makes_no_step_shorter_and_none_is_below_its_floor(
    asked: dict[str, Any], part: str, by: float
) -> None:
    before = planned("0.5b", 8, 1024, 4e9, asked, BUSY)
    rates = before.machine.rates
    assert rates is not None
    slower = replace(before.machine, rates=worsened(rates, part, by))
    spec = skeleton_of("0.5b").spec
    after = replace(before, machine=slower, bounds=step_bounds(spec, before.decisions, slower))
    assert after.bounds is not None
    shorter, longer = of("0.5b", before).step_seconds, of("0.5b", after).step_seconds
    assert longer >= shorter * (1 - 1e-6)
    assert longer >= after.bounds.floor


def test_threads_pack_no_faster_beside_the_optimizer_than_alone() -> None:
    slow: dict[str, Any] = BUSY | {"copy_to_pinned": (ThreadRate(1, 4e9),)}
    quick = Beside(100e9, IssueTimes(1.0, 1.0), IssueTimes(1.0, 1.0))
    found = [
        of("3b", planned("3b", 8, 1024, 4e9, PAGEABLE, slow | {"beside": beside})).step_seconds
        for beside in (None, quick)
    ]
    assert found[0] == found[1]


def test_a_link_that_is_slower_both_ways_binds_a_step_as_its_floor_says() -> None:
    shared = tuple(LinkRate(size, 2e9, 2e9, 1.1e9) for size in (1 << 20, 64 << 20))
    plan = planned("3b", 1, 1024, 5e9, {}, {"link": shared})
    assert plan.bounds is not None
    assert plan.bounds.binds == "link"
    assert of("3b", plan).step_seconds >= plan.bounds.floor


def test_a_run_takes_its_steps_and_what_saves_hold_up() -> None:
    plan = planned("3b", 8, 1024, 5e9, {})
    found = of("3b", plan)
    assert found.save_seconds == plan.checkpoint_bytes / 2.96e9
    assert found.stall_seconds is not None
    assert found.run_seconds is not None
    pooled = plan.decisions.pool_bytes / plan.checkpoint_bytes
    assert found.stall_seconds == found.save_seconds * (1 - pooled) - found.step_seconds
    rest = found.run_seconds - 1000 * found.step_seconds
    # The tenth is the one at the end, and waited for.
    assert rest == pytest.approx(9 * found.stall_seconds + found.save_seconds)
    assert "of which training waits" in "\n".join(found.lines())


def test_training_waits_for_all_of_a_save_that_is_not_asynchronous() -> None:
    asked = {"checkpoint": {"async_save": False}}
    plan, spec = planned("3b", 8, 1024, 5e9, asked), skeleton_of("3b").spec
    found = forecast(plan, spec, 1000, CheckpointSection(save_steps=100, async_save=False))
    assert found is not None
    assert found.save_seconds
    assert found.run_seconds is not None
    assert found.stall_seconds == found.save_seconds
    rest = found.run_seconds - 1000 * found.step_seconds
    assert rest == pytest.approx(10 * found.save_seconds)


def test_a_slow_step_is_told_in_figures_that_say_something() -> None:
    plan, spec = planned("3b", 8, 1024, 5e9, {}), skeleton_of("3b").spec
    found = forecast(plan, spec, None)
    assert found is not None
    slow = replace(found, step_seconds=4000.0, forward_seconds=999.0, tokens_per_second=0.0125)
    first = slow.lines()[0]
    assert first.startswith("a step takes about 67 min (0.0125 tokens/s, ")
    assert "999 s until the loss" in first


def test_nothing_is_forecast_where_nothing_was_measured() -> None:
    spec = make_spec()
    assert forecast(plan_for(spec, GPU), spec, 10) is None
    rates = machine(5e9).rates
    assert rates is not None
    without = replace(GPU, rates=replace(rates, compute=None))
    assert forecast(plan_for(spec, without), spec, 10) is None
