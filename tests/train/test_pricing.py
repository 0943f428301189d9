"""Remedies: each frees and costs what a plan with it says, and the cheapest comes first."""

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from megatrain_cli.config.schema import TrainConfig
from megatrain_cli.plan import plan as module
from megatrain_cli.plan.machine import MachineSpec
from megatrain_cli.plan.plan import RunPlan, make_plan
from megatrain_cli.plan.remedies import Way, device_ways, host_ways
from megatrain_cli.plan.verdict import DOES_NOT_FIT, FITS, TIGHT
from megatrain_cli.train.forecast import forecast
from megatrain_cli.train.pricing import lines_of, price, starving_slabs
from megatrain_cli.units import GIB, show_bytes
from tests.plan.small import RATES, make_config
from tests.train.test_forecast import machine as h200
from tests.train.test_forecast import skeleton_of

SKELETON = "3b"


def planned(
    there: MachineSpec, asked: dict[str, dict[str, Any]] | None = None
) -> tuple[TrainConfig, RunPlan]:
    config = make_config({"data": {"max_length": 1024}} | (asked or {}))
    skeleton = skeleton_of(SKELETON)
    return config, make_plan(config, skeleton.spec, skeleton.layouts, there)


@pytest.mark.parametrize("measured", [True, False])
def test_each_remedy_is_what_planning_with_it_says(measured: bool) -> None:
    there = replace(h200(5e9), host_bytes=30 * GIB, device_bytes=6 * GIB)
    there = there if measured else replace(there, rates=None)
    config, plan = planned(there)
    skeleton = skeleton_of(SKELETON)
    remedies = price(config, skeleton, plan)
    assert len(remedies) >= 3
    for remedy in remedies:
        then = make_plan(
            remedy.way.apply(config), skeleton.spec, skeleton.layouts, there, plan.known
        )
        assert remedy.host_freed == plan.host_bytes - then.host_bytes
        assert remedy.device_freed == plan.device_bytes - then.device_bytes
        assert remedy.verdict == then.verdict
        expected = forecast(then, skeleton.spec, None)
        assert remedy.step_seconds == (expected.step_seconds if expected else None)
        assert remedy.host_freed > 0 or remedy.device_freed > 0
        assert (remedy.more_seconds is None) is not measured
        read = remedy.to_json()
        assert read["host_bytes_freed"] == remedy.host_freed
        assert ("a step is" in remedy.line()) is measured
    lasting = [(not r.learns_the_same, r.more_seconds or 0.0) for r in remedies]
    assert lasting == sorted(lasting)


def test_a_plan_with_a_remedy_seeks_no_advice_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    there = replace(h200(5e9), host_bytes=30 * GIB, device_bytes=6 * GIB)
    config, plan = planned(there)
    skeleton = skeleton_of(SKELETON)
    monkeypatch.delattr(module, "advise")
    assert price(config, skeleton, plan)
    bare = make_plan(config, skeleton.spec, skeleton.layouts, there, advised=False)
    assert (bare.lines, bare.verdict) == (plan.lines, plan.verdict)
    for text, without in zip(plan.shortfalls, bare.shortfalls, strict=True):
        assert text.startswith(without + " ")


def test_a_remedy_that_makes_it_fit_says_so() -> None:
    there = replace(h200(5e9), host_bytes=40 * GIB)
    config, plan = planned(there)
    lines = lines_of(plan, price(config, skeleton_of(SKELETON), plan))
    assert any("bf16_stochastic" in line and line.endswith("then it fits") for line in lines)


def test_a_run_with_room_needs_no_remedy_and_a_tight_one_only_what_gives_it_room() -> None:
    config, plan = planned(h200(5e9))
    assert plan.verdict == "FITS"
    assert price(config, skeleton_of(SKELETON), plan) == ()
    exact = replace(h200(5e9), host_bytes=plan.host_bytes)
    config, plan = planned(exact)
    assert plan.verdict == "TIGHT"
    remedies = price(config, skeleton_of(SKELETON), plan)
    assert remedies
    assert {remedy.verdict for remedy in remedies} == {"FITS"}


SMALLER = skeleton_of("0.5b")


def squeezed(host_free: int, device_free: int) -> tuple[TrainConfig, RunPlan]:
    """A run to which so many MiB stay free in each place, with inputs that may wait elsewhere."""
    sections: dict[str, dict[str, Any]] = {
        "data": {"max_length": 2048},
        "train": {"micro_batch_size": 2, "gradient_accumulation_steps": 4},
        "pipeline": {"activations": "recompute"},
    }
    config, there = make_config(sections), h200(5e9)
    whole = make_plan(config, SMALLER.spec, SMALLER.layouts, there)
    there = replace(
        there,
        host_bytes=whole.host_bytes + (host_free << 20),
        device_bytes=whole.device_bytes + (device_free << 20),
    )
    return config, make_plan(config, SMALLER.spec, SMALLER.layouts, there)


def verdict_with(config: TrainConfig, plan: RunPlan, way: Way) -> str:
    spec, layouts = SMALLER.spec, SMALLER.layouts
    asked = TrainConfig.model_validate(way.apply(config).model_dump())
    return make_plan(asked, spec, layouts, plan.machine, advised=False).verdict


@pytest.mark.parametrize("host_free", [0, 100, 300, 30_000])
@pytest.mark.parametrize("device_free", [0, 200, 30_000])
def test_a_tight_run_is_told_each_change_that_gives_room_or_else_a_pair_that_does(
    host_free: int, device_free: int
) -> None:
    config, plan = squeezed(host_free, device_free)
    remedies, lines = price(config, SMALLER, plan), None
    if plan.verdict != TIGHT:
        assert remedies == ()
        return
    lines = lines_of(plan, remedies)
    length = plan.decisions.max_length
    ways = [*host_ways(config, length, on_gpu=True), *device_ways(config, length)]
    new = {way.text(config): way for way in ways if way.is_new(config)}
    enough = {text for text, way in new.items() if verdict_with(config, plan, way) == FITS}
    assert {remedy.verdict for remedy in remedies} <= {FITS}
    if enough:
        assert {remedy.text for remedy in remedies} == enough
        return
    both = [pair for a, b in combinations(new.values(), 2) if (pair := a.beside(b)) is not None]
    pairs = {way.text(config) for way in both if verdict_with(config, plan, way) == FITS}
    assert len(lines) == 1
    assert all(f"{show_bytes(n)} of {place}" in lines[0] for place, n in plan.wanting.items())
    assert {remedy.text for remedy in remedies} <= pairs
    assert len(remedies) == min(1, len(pairs))


def test_a_tight_run_that_two_changes_help_reads_so() -> None:
    config, plan = squeezed(0, 0)
    (line,) = lines_of(plan, price(config, SMALLER, plan))
    assert line == (
        "remedy: no change alone gives it the 436.2 MiB of host RAM and 266.3 MiB of GPU memory; "
        "`optimizer.update: eager` with `optimizer.max_grad_norm: null` with "
        "`data.max_length: 1024` frees 601.0 MiB of host RAM and 392.0 MiB of GPU memory (no "
        "clipping, longer rows are cut); a step is 0.103 s shorter; then it fits"
    )


def test_a_tight_run_that_nothing_helps_says_what_is_wanting() -> None:
    least: dict[str, dict[str, Any]] = {
        "data": {"max_length": 1},
        "optimizer": {
            "master": "bf16_stochastic",
            "update": "eager",
            "max_grad_norm": None,
        },
        "pipeline": {"grad_slabs": 2, "staging_buffers": 1, "activations": "recompute"},
        "checkpoint": {"bounce_pool": 0},
    }
    config = make_config(least)
    spec, layouts, there = SMALLER.spec, SMALLER.layouts, h200(5e9)
    needed = make_plan(config, spec, layouts, there).host_bytes
    plan = make_plan(config, spec, layouts, replace(there, host_bytes=needed))
    assert plan.verdict == TIGHT
    (line,) = lines_of(plan, price(config, SMALLER, plan))
    assert line == (
        "remedy: no change and no two give it the 344.8 MiB of host RAM: use a machine with more "
        "host RAM"
    )


def test_exact_masters_in_two_parts_are_no_other_result() -> None:
    there = replace(h200(5e9), host_bytes=30 * GIB)
    config, plan = planned(there, {"optimizer": {"master": "fp32"}})
    by_master = {
        remedy.way.changes.get("optimizer.master"): remedy.learns_the_same
        for remedy in price(config, skeleton_of(SKELETON), plan)
        if remedy.way.changes.get("optimizer.master")
    }
    assert by_master == {"fp32_split": True, "bf16_stochastic": False}


def test_slabs_that_starve_are_found_by_playing_with_more_of_them() -> None:
    # Adding gradients on the host is so slow that a single slab holds the device up.
    slow = replace(RATES, copy=(replace(RATES.copy[0], rate=1e9),))
    there = replace(h200(5e9), rates=slow)
    skeleton = skeleton_of(SKELETON)
    asked = {"optimizer": {"update": "eager", "max_grad_norm": None}}
    config, plan = planned(there, asked | {"pipeline": {"grad_slabs": 1}})
    line = starving_slabs(config, skeleton, plan)
    assert line is not None
    assert "`pipeline.grad_slabs: 2`" in line
    config, plan = planned(there, asked | {"pipeline": {"grad_slabs": 60}})
    assert starving_slabs(config, skeleton, plan) is None
    config, plan = planned(replace(there, rates=None), asked)
    assert starving_slabs(config, skeleton, plan) is None


def test_slabs_that_have_no_room_are_not_named() -> None:
    slow = replace(RATES, copy=(replace(RATES.copy[0], rate=1e9),))
    skeleton, there = skeleton_of(SKELETON), replace(h200(5e9), rates=slow)
    asked: dict[str, dict[str, Any]] = {
        "optimizer": {"update": "eager", "max_grad_norm": None},
        "pipeline": {"grad_slabs": 1},
    }
    config, plan = planned(there, asked)
    more = planned(there, asked | {"pipeline": {"grad_slabs": 2}})[1].host_bytes
    assert plan.host_bytes < more
    for host_bytes, named in ((more - 1, False), (more, True)):
        config, plan = planned(replace(there, host_bytes=host_bytes), asked)
        assert plan.verdict == TIGHT
        assert (starving_slabs(config, skeleton, plan) is not None) is named


def _short(plan: RunPlan) -> dict[str, int]:
    return {place: max(0, needed - limit) for place, (needed, limit) in plan.places.items()}


@pytest.mark.parametrize(("host_gib", "device_gib"), [(30, 6), (30, 139), (30, 24), (125, 6)])
def test_each_remedy_of_a_run_that_does_not_fit_makes_a_shortage_less(
    host_gib: int, device_gib: int
) -> None:
    """A GPU that is full of kept layers is not short: what frees it there would not help."""
    there = replace(h200(5e9), host_bytes=host_gib * GIB, device_bytes=device_gib * GIB)
    train = {"micro_batch_size": 2, "gradient_accumulation_steps": 32}
    config, plan = planned(there, {"train": train})
    assert plan.shortfalls
    skeleton, before = skeleton_of(SKELETON), _short(plan)
    remedies = price(config, skeleton, plan)
    assert remedies
    for remedy in remedies:
        asked = remedy.way.apply(config)
        after = _short(make_plan(asked, skeleton.spec, skeleton.layouts, there, plan.known))
        assert any(after[place] < before[place] for place in before)


@pytest.mark.parametrize("device_gib", [5, 8, 12])
@pytest.mark.parametrize(("rows", "accumulation"), [(1, 97), (8, 64), (12, 1), (64, 1)])
def test_rows_and_lengths_are_halved_until_the_run_fits_and_no_further(
    device_gib: int, rows: int, accumulation: int
) -> None:
    """Half of what needs eight times the room would be no advice."""
    train = {"micro_batch_size": rows, "gradient_accumulation_steps": accumulation}
    asked: dict[str, dict[str, Any]] = {"train": train, "data": {"max_length": 4096}}
    asked |= {"pipeline": {"activations": "recompute"}}
    there = replace(h200(5e9), device_bytes=device_gib * GIB)
    config, plan = planned(there, asked)
    assert plan.shortfalls
    named = {frozenset(r.way.changes): r for r in price(config, skeleton_of(SKELETON), plan)}
    for first in device_ways(config, 4096):
        remedy = named.get(frozenset(first.changes))
        if remedy is None or not first.further:
            continue
        steps = [first, *first.further]
        fits = [verdict_of(step.apply(config), there) != DOES_NOT_FIT for step in steps]
        assert remedy.way.changes == steps[fits.index(True) if any(fits) else 0].changes


def verdict_of(config: TrainConfig, there: MachineSpec) -> str:
    skeleton = skeleton_of(SKELETON)
    asked = TrainConfig.model_validate(config.model_dump())
    return make_plan(asked, skeleton.spec, skeleton.layouts, there, advised=False).verdict


def test_a_step_of_eight_times_the_rows_that_fit_is_told_so() -> None:
    train = {"gradient_accumulation_steps": 1000}
    config, plan = planned(replace(h200(5e9), device_bytes=24 * GIB), {"train": train})
    lines = lines_of(plan, price(config, skeleton_of(SKELETON), plan))
    start = "remedy: `train.gradient_accumulation_steps: "
    (line,) = [one for one in lines if one.startswith(start)]
    assert line.startswith(f"{start}125` frees ")
    assert line.endswith("; then it fits")


def test_a_shortage_is_not_moved_to_a_host_that_has_no_room_for_it() -> None:
    asked: dict[str, dict[str, Any]] = {"train": {"gradient_accumulation_steps": 32}}
    offload = {"activations": {"keep_layers": 0, "offload": True}}
    skeleton = skeleton_of(SKELETON)
    there = replace(h200(5e9), device_bytes=6 * GIB)
    waiting = planned(there, asked | {"pipeline": offload})[1].host_bytes
    for host_bytes, named in ((waiting - 1, False), (waiting, True)):
        config, plan = planned(replace(there, host_bytes=host_bytes), asked)
        assert len(plan.shortfalls) == 1
        keys = [key for remedy in price(config, skeleton, plan) for key in remedy.way.changes]
        assert ("pipeline.activations" in keys) is named
        assert "data.max_length" in keys


def test_seconds_of_a_remedy_are_read_as_all_others() -> None:
    config, plan = planned(replace(h200(5e9), device_bytes=GIB))
    one = price(config, skeleton_of(SKELETON), plan)[0]
    for more, said in (
        (4839.0, "; a step is 81 min longer"),
        (-25.0, "; a step is 25 s shorter"),
        (-0.001, "; a step is as long"),
        (0.0, "; a step is as long"),
    ):
        assert said in replace(one, step_seconds=100.0, more_seconds=more).line()
