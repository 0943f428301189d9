"""Steps whose micro-batches divide badly: what is said is what planning otherwise gives."""

import re
from dataclasses import replace

import pytest

from megatrain_cli.config.schema import TrainConfig
from megatrain_cli.plan.decide import Known
from megatrain_cli.plan.machine import MachineSpec
from megatrain_cli.plan.plan import RunPlan, make_plan
from megatrain_cli.plan.profiles import find_profile
from megatrain_cli.train.joining import poor_division, warned
from megatrain_cli.train.pricing import step_seconds
from megatrain_cli.units import GIB, show_seconds
from tests.plan.small import CPU, make_config
from tests.train.test_forecast import skeleton_of

H200 = find_profile("h200-1.5tb")
SMALL = replace(H200, device_bytes=24 * GIB)  # eight rows in a layer fit, and no more
SKELETON = skeleton_of("0.5b")


def planned(
    rows: int, accumulation: int, there: MachineSpec, joined: int | None = None
) -> tuple[TrainConfig, RunPlan]:
    train = {"micro_batch_size": rows, "gradient_accumulation_steps": accumulation}
    config = make_config({"data": {"max_length": 1024}, "train": train})
    return config, make_plan(
        config, SKELETON.spec, SKELETON.layouts, there, Known(joined=joined), advised=False
    )


def seconds_of(rows: int, accumulation: int, there: MachineSpec) -> float:
    found = step_seconds(planned(rows, accumulation, there)[1], SKELETON)
    assert found is not None
    return found


@pytest.mark.parametrize("there", [H200, SMALL], ids=["large", "small"])
@pytest.mark.parametrize(
    ("rows", "accumulation"),
    [(1, n) for n in (1, 7, 11, 13, 16, 32, 33, 37, 38, 61, 64, 74, 101, 1009)]
    + [(3, 11), (3, 13), (7, 5), (16, 3), (5, 31), (33, 2)],
)
def test_each_warning_is_true_and_none_is_missing(
    rows: int, accumulation: int, there: MachineSpec
) -> None:
    config, plan = planned(rows, accumulation, there)
    line = poor_division(config, SKELETON, plan)
    before, total = seconds_of(rows, accumulation, there), rows * accumulation

    def gain(rows: int, accumulation: int) -> float:
        """More rows share what a step takes anyway: only a shorter step is a gain then."""
        after = seconds_of(rows, accumulation, there)
        return before / total / (after / min(total, rows * accumulation))

    if line is None:
        near = [n for n in range(accumulation - 4, accumulation + 5) if n > 0]
        # By a little more where the floor of a step with fewer rows is lower.
        assert max(gain(rows, n) for n in near) < 1.12
        return
    keys = dict(re.findall(r"`train\.(\w+): (\d+)`", line))
    set_rows = int(keys.get("micro_batch_size", rows))
    set_accumulation = int(keys.get("gradient_accumulation_steps", accumulation))
    assert gain(set_rows, set_accumulation) > 1.1
    after = seconds_of(set_rows, set_accumulation, there)
    for seconds, step in ((before, total), (after, set_rows * set_accumulation)):
        assert f" {step} rows take {show_seconds(seconds)}" in line
    assert (set_rows == rows) is (set_rows * set_accumulation != total)


def test_a_prime_number_of_rows_reads_so() -> None:
    config, plan = planned(1, 37, H200)
    (line,) = warned(config, SKELETON, plan).warnings
    assert line == (
        "37 micro-batches a step divide badly: with 1 row in a layer at once 37 rows take 3.53 s. "
        "Set `train.micro_batch_size: 37` with `train.gradient_accumulation_steps: 1`: with 37 "
        "rows at once 37 rows take 0.315 s"
    )
    config, plan = planned(1, 101, H200)
    assert poor_division(config, SKELETON, plan) == (
        "101 micro-batches a step divide badly: with 1 row in a layer at once 101 rows take 9.59 s."
        " Set `train.gradient_accumulation_steps: 100`: with 25 rows at once 100 rows take 0.832 s"
    )


def test_what_a_rehearsal_has_parted_is_no_matter_of_division() -> None:
    """There was no room for all 32 at once: a number beside it would meet the same."""
    config, plan = planned(1, 32, H200, joined=2)
    assert poor_division(config, SKELETON, plan) is None


def test_what_a_rehearsal_has_confirmed_is_warned_of_all_the_same() -> None:
    config, plan = planned(1, 37, H200, joined=1)
    assert poor_division(config, SKELETON, plan) == poor_division(
        config, SKELETON, planned(1, 37, H200)[1]
    )


def test_nothing_is_said_where_nothing_is_joined_or_known() -> None:
    for there in (CPU, replace(H200, rates=None)):
        config, plan = planned(1, 37, there)
        assert poor_division(config, SKELETON, plan) is None
