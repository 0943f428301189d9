"""FITS, TIGHT or DOES NOT FIT: more memory never makes it worse, and the line names the bytes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.model.spec import ModelSpec
from megatrain_cli.plan.machine import MachineSpec
from megatrain_cli.plan.verdict import DOES_NOT_FIT, FITS, TIGHT, short_of_room, verdict_line
from megatrain_cli.units import GIB, show_bytes
from tests.plan.small import CPU, GPU, Sections, machines, make_spec, plan_for, sections, specs

SPEC = make_spec()
WORST_FIRST = (DOES_NOT_FIT, TIGHT, FITS)


@pytest.mark.parametrize(
    ("limit_gib", "spare_gib"),
    [(8, 0.4), (40, 2), (1500, 2)],
)
def test_room_is_five_percent_or_two_gib_whichever_is_less(
    limit_gib: int, spare_gib: float
) -> None:
    limit = limit_gib * GIB
    spare = int(spare_gib * GIB)
    assert not short_of_room(limit - spare, limit)
    assert short_of_room(limit - spare + 1, limit)


@given(
    specs,
    machines,
    sections,
    st.integers(0, 1 << 30),
    st.integers(0, 1 << 30),
    st.sampled_from([1, 1 << 20, 1 << 27, 1 << 40]),
)
def test_more_memory_never_gives_a_worse_verdict(
    spec: ModelSpec, machine: MachineSpec, asked: Sections, host: int, device: int, more: int
) -> None:
    whole = plan_for(spec, replace(machine, host_bytes=0, device_bytes=0), asked)
    small = replace(
        machine, host_bytes=host + whole.host_bytes // 2, device_bytes=device + whole.device_bytes
    )
    large = replace(
        small, host_bytes=small.host_bytes + more, device_bytes=small.device_bytes + more
    )
    before, after = (plan_for(spec, one, asked).verdict for one in (small, large))
    assert WORST_FIRST.index(after) >= WORST_FIRST.index(before)


@pytest.mark.parametrize("machine", [CPU, GPU])
def test_the_verdict_follows_what_a_run_needs_at_least(machine: MachineSpec) -> None:
    spec = make_spec()
    asked: Sections = {"pipeline": {"activations": "recompute"}}
    needed = plan_for(spec, machine, asked).host_bytes
    for host, verdict in (
        (needed - 1, DOES_NOT_FIT),
        (needed, TIGHT),
        (round(needed / 0.95) - 2, TIGHT),
        (round(needed / 0.95) + 2, FITS),
    ):
        plan = plan_for(spec, replace(machine, host_bytes=host), asked)
        assert plan.verdict == verdict
        assert plan.verdict_line.startswith(f"{verdict}: ")
    missing = plan_for(spec, replace(machine, host_bytes=needed - 3), asked)
    assert missing.verdict_line == "DOES NOT FIT: 3 B of host RAM are missing"


def test_what_stays_free_is_told_place_by_place() -> None:
    places = {"host RAM": (3 * GIB, 8 * GIB), "GPU memory": (GIB, 4 * GIB)}
    assert verdict_line(FITS, places, {}) == (
        "FITS: 5.00 GiB of 8.00 GiB of host RAM stay free, "
        "3.00 GiB of 4.00 GiB of GPU memory stay free"
    )


@given(st.integers(0, 100), st.integers(0, 100))
def test_a_tight_run_is_short_of_what_each_place_lacks(host_free: int, device_free: int) -> None:
    """In 1/1000 of what is needed; no more and no less than to have room."""
    asked: Sections = {"pipeline": {"activations": "recompute"}}
    whole = plan_for(SPEC, GPU, asked)
    limits = {
        "host RAM": whole.host_bytes + whole.host_bytes * host_free // 1000,
        "GPU memory": whole.device_bytes + whole.device_bytes * device_free // 1000,
    }
    plan = plan_for(
        SPEC, replace(GPU, host_bytes=limits["host RAM"], device_bytes=limits["GPU memory"]), asked
    )
    for place, (needed, limit) in plan.places.items():
        short = plan.wanting.get(place, 0)
        assert not short_of_room(needed - short, limit)
        assert not short or short_of_room(needed - short + 1, limit)
        assert (f"{show_bytes(short)} of {place}" in plan.verdict_line.partition(";")[2]) is (
            short > 0
        )
    assert (plan.verdict == TIGHT) is bool(plan.wanting)


def test_what_auto_fills_up_is_not_tight() -> None:
    spec = make_spec(layers=120, hidden=512)
    asked: Sections = {"data": {"max_length": 4096}, "train": {"micro_batch_size": 32}}
    limit = 64 * GIB
    plan = plan_for(spec, replace(GPU, device_bytes=limit), asked)
    assert plan.decisions.keep_layers > 0
    assert short_of_room(plan.device_bytes, limit)
    assert plan.verdict == FITS
