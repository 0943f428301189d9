"""What follows from measured rates: the size of a burst, the rate with other numbers of threads."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.plan.rates import ComputeRates, LinkRate, ThreadRate, rate_at
from tests.plan.small import RATES

speeds = st.lists(st.floats(1e6, 1e12), min_size=1, max_size=8)
shares = st.floats(0.01, 1.0)


def link(to_device: list[float]) -> tuple[LinkRate, ...]:
    return tuple(LinkRate(1 << i, rate, 1.0, 1.0) for i, rate in enumerate(to_device))


def test_the_burst_of_an_example() -> None:
    assert RATES.burst_bytes(0.8) == 4 << 20
    assert RATES.burst_bytes(0.95) == 16 << 20
    assert RATES.burst_bytes(1.0) == 64 << 20
    assert RATES.burst_bytes(0.01) == 1 << 20


def test_without_a_link_there_is_no_burst() -> None:
    assert replace(RATES, link=None).burst_bytes(0.8) is None


@given(speeds, shares)
def test_from_the_burst_on_each_size_reaches_the_share_and_the_size_before_does_not(
    to_device: list[float], share: float
) -> None:
    rates = replace(RATES, link=link(to_device))
    found = rates.burst_bytes(share)
    assert found is not None
    wanted = share * max(to_device)
    index = found.bit_length() - 1
    if to_device[-1] < wanted:  # the largest is the answer where not even that one reaches it
        assert index == len(to_device) - 1
        return
    assert all(rate >= wanted for rate in to_device[index:])
    assert index == 0 or to_device[index - 1] < wanted


@given(speeds, shares, shares)
def test_a_higher_target_never_needs_a_smaller_burst(
    to_device: list[float], one: float, other: float
) -> None:
    rates = replace(RATES, link=link(to_device))
    low, high = rates.burst_bytes(min(one, other)), rates.burst_bytes(max(one, other))
    assert low is not None
    assert high is not None
    assert low <= high


@given(st.integers(1, 64))
def test_a_rate_lies_between_those_of_its_neighbours_and_meets_the_measured_ones(
    threads: int,
) -> None:
    points = RATES.adam
    found = rate_at(points, threads)
    assert points[0].rate <= found <= points[-1].rate
    for point in points:
        assert rate_at(points, point.threads) == point.rate
    assert rate_at(points, threads + 1) >= found


def test_one_point_is_the_rate_of_all() -> None:
    assert {rate_at((ThreadRate(2, 3.0),), n) for n in (1, 2, 5)} == {3.0}


def test_wider_layers_compute_faster_up_to_the_rate_of_products() -> None:
    rates = ComputeRates(matmul=780e12, layer=400e12, compiled_layer=563e12)
    assert rates.of_layers(2048, compiled=True) == pytest.approx(563e12)
    assert rates.of_layers(2048, compiled=False) == pytest.approx(400e12)
    found = [rates.of_layers(width, compiled=True) for width in (512, 2048, 3584, 1 << 20)]
    assert found == sorted(found)
    assert found[-1] == pytest.approx(780e12, rel=0.01)
    # A step of the 7B shape at 64 x 1024, measured where these rates were: docs/benchmarks.md.
    assert found[2] == pytest.approx(640e12, rel=0.01)
