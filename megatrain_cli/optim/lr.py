"""The learning rate as a function of the step alone, so that a resumed run cannot lose its place.

The formulas are those of transformers' `get_scheduler` (`optimization.py`), on purpose down to the
first warm-up step, whose rate is 0: with `warmup_steps: 4` the first five updates use 0, 1/4, 1/2,
3/4 and 1 times the peak.
"""

import math
from typing import Literal, assert_never

ScheduleType = Literal["constant", "linear", "cosine"]


def learning_rate(
    step: int,
    *,
    peak: float,
    schedule: ScheduleType,
    warmup_steps: int,
    total_steps: int,
    min_lr_ratio: float,
) -> float:
    """The rate of one update.

    Args:
        step: Updates completed before this one; 0 is the first update.
        peak: The rate after warm-up.
        schedule: `constant`, or a fall from `peak` to `min_lr_ratio * peak` that would be reached
            by the update after the last, as in transformers.
        warmup_steps: Updates of linear rise from 0.
        total_steps: Updates of the whole run, warm-up included.
        min_lr_ratio: Where the fall ends, as a fraction of `peak`; transformers' `linear` ends at 0
            and its `cosine_with_min_lr` has this as `min_lr_rate`.
    """
    if step < warmup_steps:
        return peak * (step / warmup_steps)
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    match schedule:
        case "constant":
            return peak
        case "linear":
            left = 1.0 - progress
        case "cosine":
            left = 0.5 * (1.0 + math.cos(math.pi * progress))
        case _:
            assert_never(schedule)
    return peak * (left * (1.0 - min_lr_ratio) + min_lr_ratio)


def warmup_steps_of(ratio: float, total_steps: int) -> int:
    """The warm-up of a share of all steps, rounded up as in transformers' `TrainingArguments`."""
    return math.ceil(total_steps * ratio)
