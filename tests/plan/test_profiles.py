"""Profiles: every number is marked, machines are as their names say, and plans tell the kinds."""

import pytest

from megatrain_cli.errors import ConfigError
from megatrain_cli.plan.decide import copy_threads
from megatrain_cli.plan.machine import MachineSpec
from megatrain_cli.plan.profiles import find_profile, known_profiles
from megatrain_cli.plan.rates import rate_at
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
    assert sum(len(labels.split(", ")) for labels in kinds.values()) == 14
    amount = name.rpartition("-")[2]
    if amount[-2:] in ("gb", "tb"):  # what may be taken is less than what is built in
        built_in = float(amount[:-2]) * (1000 if amount.endswith("tb") else 1)
        assert 0.85 * built_in * GIB < there.host_bytes < built_in * GIB


# By datasheets and whitepapers, as in the comments of the files: dense BF16 TFLOPS, GB/s each way
# of the link, GB/s of the RAM beside it.
_STATED = {
    "NVIDIA A100 80GB PCIe": (312, 32, 205),
    "NVIDIA GB10": (125, 273, 273),  # its link is its memory, and of its TFLOPS an eighth of FP4's
    "NVIDIA GH200 480GB": (989, 450, 384),
    "NVIDIA H100 PCIe": (756, 64, 307),
    "NVIDIA H100 80GB HBM3": (989, 64, 614),
    "NVIDIA H200": (989, 64, 614),
    "NVIDIA GeForce RTX 3090": (71, 32, 52),
    "NVIDIA GeForce RTX 4090": (165, 32, 90),
}
_ADAM_BYTES = 26  # of `fp32_split`, read and written: 14 + 12


@pytest.mark.parametrize("name", NAMES)
def test_no_rate_of_a_profile_is_above_what_its_parts_are_stated_to_reach(name: str) -> None:
    there = find_profile(name)
    rates = there.rates
    assert rates is not None
    assert rates.compute is not None
    assert rates.link is not None
    tflops, link, ram = _STATED[there.device_name or ""]
    assert 0.6 * tflops < rates.compute.matmul / 1e12 < 0.9 * tflops
    assert max(max(point.to_device, point.to_host) for point in rates.link) <= 0.9 * link * 1e9
    assert rates.adam[-1].rate * _ADAM_BYTES < 0.85 * ram * 1e9
    assert 2 * rates.copy[-1].rate < 0.85 * ram * 1e9  # a copy reads and writes
    assert rates.read[-1].rate < 0.85 * ram * 1e9
    assert rates.beside is not None
    assert rates.beside.copy_to_pinned < rate_at(rates.copy, copy_threads(there))


def test_a_plan_says_which_kind_of_numbers_it_used() -> None:
    there: MachineSpec = find_profile("h200-128gb")
    summary = dict(plan_for(make_spec(), there).summary)
    assert summary["machine"] == (
        "profile h200-128gb: measured: RAM, GPU memory, cores, link, copies in RAM, reads of RAM, "
        "Adam, products, compiled layers, issuing, beside the optimizer, beside copies, disk; "
        "assumed: layers"
    )


def test_an_unknown_machine_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"`abacus` is neither .* Known are .*h200-1.5tb"):
        find_profile("abacus")
