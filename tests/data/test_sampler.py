"""The order of rows is a pure function of seed, epoch and place, so a run can go on anywhere."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.data.sampler import RowStream, epoch_order
from megatrain_cli.errors import InternalError


def splitmix(seed: int, epoch: int, index: int) -> int:
    """The same hash in Python's own integers."""
    mask = 2**64 - 1
    key = seed & mask
    for more in (epoch, index, None):
        key = (key + 0x9E3779B97F4A7C15) & mask
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & mask
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & mask
        key ^= key >> 31
        key = (key + (more or 0)) & mask
    return key


@given(st.integers(1, 50), st.integers(-(2**70), 2**70), st.integers(0, 2**40))
def test_the_order_is_the_rows_sorted_by_a_hash(num_rows: int, seed: int, epoch: int) -> None:
    expected = sorted(range(num_rows), key=lambda i: splitmix(seed, epoch, i))
    assert epoch_order(num_rows, seed, epoch).tolist() == expected


def test_the_order_never_changes_between_versions() -> None:
    assert epoch_order(12, 42, 0).tolist() == [3, 6, 8, 0, 4, 9, 7, 1, 2, 5, 11, 10]


@given(st.integers(1, 40), st.integers(0, 9), st.booleans())
def test_each_row_is_seen_once_an_epoch(num_rows: int, seed: int, shuffle: bool) -> None:
    stream = RowStream(num_rows, seed, shuffle)
    for epoch in range(3):
        seen = [stream.row(epoch * num_rows + place) for place in range(num_rows)]
        assert sorted(seen) == list(range(num_rows))
        if not shuffle:
            assert seen == list(range(num_rows))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {tuple(epoch_order(12, seed, epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_every_row_is_as_likely_in_every_place() -> None:
    places = np.stack([np.argsort(epoch_order(8, 1, epoch)) for epoch in range(4000)])
    counts = np.stack([np.bincount(places[:, i], minlength=8) for i in range(8)])
    # Binomial(4000, 1/8): mean 500, deviation 21; five deviations over 64 cells.
    assert counts.min() > 395
    assert counts.max() < 605


@given(st.integers(1, 12), st.integers(1, 9), st.integers(0, 30), st.booleans())
def test_a_resumed_stream_goes_on_where_an_unbroken_one_would(
    num_rows: int, rows_per_update: int, stopped_after: int, shuffle: bool
) -> None:
    unbroken, resumed = RowStream(num_rows, 7, shuffle), RowStream(num_rows, 7, shuffle)
    updates = [unbroken.rows_of_update(i, rows_per_update) for i in range(stopped_after + 3)]
    for i in range(stopped_after, stopped_after + 3):
        assert resumed.rows_of_update(i, rows_per_update) == updates[i]
    flat = [row for update in updates for row in update]
    assert flat == [RowStream(num_rows, 7, shuffle).row(g) for g in range(len(flat))]


def test_without_shuffling_rows_come_round_in_the_order_of_the_file() -> None:
    stream = RowStream(5, 0, shuffle=False)
    updates = [stream.rows_of_update(i, 3) for i in range(4)]
    assert updates == [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1]]


def test_a_run_of_whole_epochs_ends_with_a_smaller_update() -> None:
    stream = RowStream(5, 0, shuffle=False)
    updates = [stream.rows_of_update(i, 4, total_rows=10) for i in range(4)]
    assert updates == [[0, 1, 2, 3], [4, 0, 1, 2], [3, 4], []]


def test_a_stream_of_no_rows_is_a_bug() -> None:
    with pytest.raises(InternalError):
        RowStream(0, 0, shuffle=True)


def test_the_sampler_loads_neither_torch_nor_transformers() -> None:
    modules = "sampler, source, batch, examples, template"
    code = (
        f"import sys; from megatrain_cli.data import {modules}; "
        "sys.exit(len({'torch', 'transformers', 'tokenizers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
