"""What is said of the lengths of rows is true of any rows."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.data.shown import measure_lengths


@given(st.lists(st.integers(1, 99), min_size=1, max_size=60))
def test_as_many_rows_as_are_said_are_up_to_a_length_and_no_smaller_one(rows: list[int]) -> None:
    lengths = np.array(rows, dtype=np.int64)
    found = measure_lengths(lengths)
    assert (found["min"], found["max"]) == (min(rows), max(rows))
    for name, percent in (("median", 50), ("p95", 95)):
        assert found[name] in rows
        assert 100 * int((lengths <= found[name]).sum()) >= percent * len(rows)
        assert 100 * int((lengths < found[name]).sum()) < percent * len(rows)
