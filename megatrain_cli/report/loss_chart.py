"""A loss curve drawn in plain characters, for places that show no pictures."""

import math
from collections.abc import Sequence

_LABEL = 10  # characters of the scale on the left


def loss_chart(points: Sequence[tuple[int, float]], width: int = 60, height: int = 12) -> str:
    """Draw losses over steps: one mark a column, at the mean of the steps that fall into it.

    Args:
        points: Step and loss, in order of steps. Losses that are not finite are left out.
        width: Columns of the curve.
        height: Rows of the curve, 2 or more.

    Returns:
        Lines of one length; the empty text if no loss is finite.
    """
    finite = [(step, loss) for step, loss in points if math.isfinite(loss)]
    if not finite:
        return ""
    first, last = finite[0][0], finite[-1][0]
    columns: list[list[float]] = [[] for _ in range(width)]
    for step, loss in finite:
        columns[(step - first) * (width - 1) // max(last - first, 1)].append(loss)
    means = [math.fsum(column) / len(column) if column else None for column in columns]
    seen = [mean for mean in means if mean is not None]
    low, high = min(seen), max(seen)
    rows = [[" "] * width for _ in range(height)]
    for column, mean in enumerate(means):
        if mean is not None:
            share = (high - mean) / (high - low) if high > low else 0.0
            rows[round(share * (height - 1))][column] = "*"
    labels = {0: f"{high:.4g}", height - 1: f"{low:.4g}"}
    lines = [
        f"{labels.get(number, ''):>{_LABEL}} |{''.join(row)}" for number, row in enumerate(rows)
    ]
    steps = f"{f'step {first}':<{width - len(str(last))}}{last}"
    return "\n".join([*lines, f"{'':{_LABEL}} +{'-' * width}", f"{'':{_LABEL}}  {steps}"])
