"""Profiles: every number is marked, machines are as their names say, and plans tell the kinds."""

import pytest

from megatrain_cli.errors import ConfigError
from megatrain_cli.plan.machine import MachineSpec
from megatrain_cli.plan.profiles import find_profile, known_profiles
from megatrain_cli.units import GIB
from tests.plan.small import make_spec, plan_for

NAMES = tuple(known_profiles())


def test_the_machines_that_people_ask_about_are_there() -> None:
    for gpu in ("rtx3090", "rtx4090", "a100-pcie", "h100-pcie", "h100-sxm", "gh200", "dgx-spark"):
        assert any(name.startswith(gpu) for name in NAMES)
    assert {"h200-128gb", "h200-1.5tb", "rtx3090-64gb", "rtx3090-256gb"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_profile_is_a_machine_whose_every_number_is_marked(name: str) -> None:
    there = find_profile(name)
    assert there.has_cuda
    assert there.rates is not None
    link = there.rates.link
    assert link is not None
    assert [point.num_bytes for point in link] == sorted(point.num_bytes for point in link)
    for points in (there.rates.copy, there.rates.read, there.rates.adam):
        assert [point.threads for point in points] == sorted(point.threads for point in points)
    marks = there.origin.removeprefix(f"profile {name}: ").split("; ")
    kinds = dict(mark.split(": ") for mark in marks)
    assert set(kinds) <= {"measured", "datasheet", "assumed"}
    assert sum(len(labels.split(", ")) for labels in kinds.values()) == 11
    amount = name.rpartition("-")[2]
    if amount[-2:] in ("gb", "tb"):  # what may be taken is less than what is built in
        built_in = float(amount[:-2]) * (1000 if amount.endswith("tb") else 1)
        assert 0.85 * built_in * GIB < there.host_bytes < built_in * GIB


def test_a_plan_says_which_kind_of_numbers_it_used() -> None:
    there: MachineSpec = find_profile("h200-128gb")
    summary = dict(plan_for(make_spec(), there).summary)
    assert summary["machine"] == (
        "profile h200-128gb: measured: RAM, GPU memory, cores, link, copies in RAM, reads of RAM, "
        "Adam, products, compiled layers, disk; assumed: layers"
    )


def test_an_unknown_machine_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"`abacus` is neither .* Known are .*h200-1.5tb"):
        find_profile("abacus")
