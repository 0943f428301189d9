"""The learning rate is transformers' one, as a function of the step alone."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TrainingArguments, get_scheduler

from megatrain_cli.optim.lr import ScheduleType, learning_rate, warmup_steps_of

HUGGING_FACE: dict[ScheduleType, str] = {
    "constant": "constant_with_warmup",
    "linear": "linear",
    "cosine": "cosine_with_min_lr",
}


def rates(
    schedule: ScheduleType, total: int, warmup: int = 0, min_ratio: float = 0.0, peak: float = 1e-5
) -> list[float]:
    return [
        learning_rate(
            step,
            peak=peak,
            schedule=schedule,
            warmup_steps=warmup,
            total_steps=total,
            min_lr_ratio=min_ratio,
        )
        for step in range(total)
    ]


def hugging_face_rates(
    schedule: ScheduleType, total: int, warmup: int, min_ratio: float, peak: float
) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=peak)
    specific = {"min_lr_rate": min_ratio} if schedule == "cosine" else None
    scheduler = get_scheduler(
        HUGGING_FACE[schedule], optimizer, warmup, total, scheduler_specific_kwargs=specific
    )
    used = []
    for _ in range(total):
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return used


@given(
    st.sampled_from(list(HUGGING_FACE)),
    st.integers(1, 40),
    st.integers(0, 40),
    st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)
def test_every_update_uses_the_rate_of_transformers(
    schedule: ScheduleType, total: int, warmup: int, min_ratio: float
) -> None:
    floor = min_ratio if schedule == "cosine" else 0.0  # transformers' linear ends at 0
    expected = hugging_face_rates(schedule, total, warmup, floor, 3e-4)
    assert rates(schedule, total, warmup, floor, 3e-4) == pytest.approx(expected, rel=1e-12)


def test_linear_without_warmup_starts_at_the_peak_and_falls_evenly() -> None:
    assert rates("linear", 10) == pytest.approx([1e-5 - 1e-6 * i for i in range(10)], rel=1e-12)


def test_the_first_warmup_update_has_rate_zero_as_in_transformers() -> None:
    assert rates("constant", 6, warmup=4, peak=1.0) == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]


@given(
    st.sampled_from(list(HUGGING_FACE)),
    st.integers(1, 100),
    st.integers(0, 100),
    st.floats(0, 1),
)
def test_after_warmup_the_rate_never_rises_and_stays_above_its_floor(
    schedule: ScheduleType, total: int, warmup: int, min_ratio: float
) -> None:
    after = rates(schedule, total, warmup, min_ratio, peak=1.0)[warmup:]
    assert all(a >= b for a, b in pairwise(after))
    assert all(min_ratio - 1e-12 <= rate <= 1 for rate in after)


def test_beyond_the_last_step_the_rate_stays_at_its_floor() -> None:
    rate = learning_rate(
        50, peak=1.0, schedule="cosine", warmup_steps=0, total_steps=10, min_lr_ratio=0.1
    )
    assert rate == pytest.approx(0.1)


@pytest.mark.parametrize("ratio", [0.0, 0.03, 0.1, 0.3, 0.5, 0.999])
@pytest.mark.parametrize("total", [1, 5, 7, 30, 1000])
def test_a_share_of_the_steps_is_as_many_warm_up_steps_as_in_transformers(
    ratio: float, total: int
) -> None:
    class Shared:
        warmup_steps = ratio

    expected = TrainingArguments.get_warmup_steps(Shared(), total)  # type: ignore[arg-type]  # reads one attribute
    assert warmup_steps_of(ratio, total) == expected
