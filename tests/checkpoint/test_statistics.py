"""Statistics are those of the whole tensor, however it is cut into pieces."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.checkpoint.statistics import Statistics


@given(
    st.lists(st.floats(width=32), max_size=40),
    st.lists(st.integers(0, 40), max_size=4),
)
def test_any_cut_gives_what_the_whole_tensor_has(values: list[float], cuts: list[int]) -> None:
    whole = np.array(values, dtype=np.float32)
    found = Statistics()
    for piece in np.split(whole, sorted(cuts)):
        found.add(piece)
    finite = [float(value) for value in whole if np.isfinite(value)]
    assert found.count == len(values)
    assert found.nan == sum(1 for value in values if np.isnan(value))
    assert found.infinite == sum(1 for value in values if np.isinf(value))
    assert found.is_finite == (len(finite) == len(values))
    assert found.negative == sum(1 for value in finite if value < 0)
    assert found.zero == sum(1 for value in finite if value == 0)
    assert found.is_zero == (len(values) > 0 and all(value == 0 for value in values))
    assert found.smallest == min(finite, default=float("inf"))
    assert found.largest == max(finite, default=float("-inf"))
    mean = sum(map(abs, finite)) / len(finite) if finite else 0.0
    assert np.isclose(found.mean_magnitude, mean, rtol=1e-12)
