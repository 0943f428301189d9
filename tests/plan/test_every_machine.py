"""Laws of a plan, on every known machine: of a dense model and of a mixture of experts."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch

from megatrain_cli.config.schema import TrainConfig
from megatrain_cli.model.known import known_skeleton
from megatrain_cli.model.skeleton import Skeleton
from megatrain_cli.plan.machine import MachineSpec
from megatrain_cli.plan.plan import RunPlan, make_plan
from megatrain_cli.plan.profiles import find_profile, known_profiles
from megatrain_cli.plan.verdict import DOES_NOT_FIT, FITS, TIGHT
from megatrain_cli.train.forecast import Forecast, forecast
from tests.plan.small import Sections, make_config

DEFERRED: Sections = {"train": {"gradient_accumulation_steps": 8}, "data": {"max_length": 1024}}
EAGER: Sections = DEFERRED | {"optimizer": {"update": "eager", "max_grad_norm": None}}
PAGEABLE: Sections = {"store": {"memory": "pageable"}}
MODELS = {"qwen2.5-14b": "sdpa", "gpt-oss-20b": "eager"}


@cache
def skeleton_of(name: str) -> Skeleton:
    return known_skeleton(name, dtype=torch.bfloat16, attention=MODELS[name])


def config_of(name: str, asked: Sections) -> TrainConfig:
    return make_config(asked | {"model": {"attention": MODELS[name]}})


def planned(name: str, machine: MachineSpec, asked: Sections) -> tuple[RunPlan, Forecast]:
    made = skeleton_of(name)
    plan = make_plan(config_of(name, asked), made.spec, made.layouts, machine, advised=False)
    found = forecast(plan, made.spec, 1000)
    assert found is not None
    return plan, found


def numbers(value: object) -> Iterator[float]:
    """All within lists and sections."""
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from numbers(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from numbers(one)


@pytest.mark.parametrize("asked", [DEFERRED, EAGER], ids=["deferred", "eager"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", known_profiles())
def test_a_plan_is_of_finite_numbers_and_keeps_its_laws(
    name: str, model: str, asked: Sections
) -> None:
    machine = find_profile(name)
    plan, found = planned(model, machine, asked)
    assert plan.bounds is not None
    told = [*numbers(plan.to_json()), *numbers(found.to_json())]
    assert all(math.isfinite(number) and number >= 0 for number in told)
    assert found.step_seconds >= plan.bounds.floor
    short = any(needed > limit for needed, limit in plan.places.values())
    assert (plan.verdict == DOES_NOT_FIT) is short

    pageable, slower = planned(model, machine, asked | PAGEABLE)
    assert slower.step_seconds >= found.step_seconds * (1 - 1e-6)
    assert pageable.host_bytes >= plan.host_bytes

    order = [FITS, TIGHT, DOES_NOT_FIT]
    for more in (
        replace(machine, host_bytes=2 * machine.host_bytes),
        replace(machine, device_bytes=2 * machine.device_bytes),
    ):
        then, _ = planned(model, more, asked)
        assert order.index(then.verdict) <= order.index(plan.verdict)
