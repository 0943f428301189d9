"""The order of rows is a pure function of seed, epoch and place, so a run can go on anywhere."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.data.sampler import RowStream, rows_at, rows_of_update
from megatrain_cli.errors import InternalError

MASK = 2**64 - 1


def mix(key: int) -> int:
    key = (key + 0x9E3779B97F4A7C15) & MASK
    key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & MASK
    return key ^ (key >> 31)


def row_at(place: int, num_rows: int, seed: int, epoch: int) -> int:
    """The same rule in Python's own integers, a place at a time."""
    a = 1
    while a * a < num_rows:
        a += 1
    b = -(-num_rows // a)
    key = mix((mix(seed & MASK) + epoch) & MASK)
    while True:
        upper, lower = divmod(place, b)
        for i in range(6):
            upper = (upper + mix((lower + mix(key + 2 * i & MASK)) & MASK) % a) % a
            lower = (lower + mix((upper + mix(key + 2 * i + 1 & MASK)) & MASK) % b) % b
        place = upper * b + lower
        if place < num_rows:
            return place


def epoch_order(num_rows: int, seed: int, epoch: int) -> list[int]:
    order: list[int] = rows_at(np.arange(num_rows), num_rows, seed, epoch).tolist()
    return order


@given(st.integers(1, 300), st.integers(-(2**70), 2**70), st.integers(0, 2**40))
def test_the_order_is_the_rule_that_is_written_down(num_rows: int, seed: int, epoch: int) -> None:
    found = epoch_order(num_rows, seed, epoch)
    assert found == [row_at(place, num_rows, seed, epoch) for place in range(num_rows)]
    assert sorted(found) == list(range(num_rows))


def test_the_order_never_changes_between_versions() -> None:
    assert epoch_order(12, 42, 0) == [row_at(place, 12, 42, 0) for place in range(12)]
    assert epoch_order(12, 42, 0) == GOLDEN


GOLDEN = [2, 8, 11, 3, 1, 6, 10, 9, 4, 5, 7, 0]


@pytest.mark.parametrize("num_rows", [*range(1, 70), 1023, 1024, 1025, 65_537])
def test_each_row_comes_once_whatever_their_number(num_rows: int) -> None:
    for epoch in range(3):
        assert sorted(epoch_order(num_rows, 3, epoch)) == list(range(num_rows))


@given(st.integers(1, 40), st.integers(0, 9), st.booleans())
def test_each_row_is_seen_once_an_epoch(num_rows: int, seed: int, shuffle: bool) -> None:
    stream = RowStream(num_rows, seed, shuffle)
    for epoch in range(3):
        seen = stream.rows(epoch * num_rows, (epoch + 1) * num_rows)
        assert sorted(seen) == list(range(num_rows))
        if not shuffle:
            assert seen == list(range(num_rows))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {tuple(epoch_order(12, seed, epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


@pytest.mark.parametrize("num_rows", [2, 3, 5, 8, 13])
def test_every_row_is_as_likely_in_every_place(num_rows: int) -> None:
    orders = np.array([epoch_order(num_rows, 1, epoch) for epoch in range(4000)])
    counts = np.stack([np.bincount(orders[:, i], minlength=num_rows) for i in range(num_rows)])
    mean, share = 4000 / num_rows, 1 / num_rows
    deviation = np.sqrt(4000 * share * (1 - share))  # binomial
    assert abs(counts - mean).max() < 5 * deviation


@pytest.mark.parametrize("num_rows", [4, 8, 13])
def test_neighbours_are_parted_as_chance_would(num_rows: int) -> None:
    """Each ordered pair of rows is as likely as any other to stand at places 0 and 1."""
    orders = np.array([epoch_order(num_rows, 2, epoch) for epoch in range(6000)])
    pairs = np.bincount(orders[:, 0] * num_rows + orders[:, 1], minlength=num_rows**2)
    pairs = pairs.reshape(num_rows, num_rows)[~np.eye(num_rows, dtype=bool)]
    share = 1 / (num_rows * (num_rows - 1))
    assert abs(pairs - 6000 * share).max() < 5 * np.sqrt(6000 * share * (1 - share))


def test_shuffled_rows_are_spread_over_the_files() -> None:
    """No trend: the places of 4,000 rows and the rows are uncorrelated, and so are neighbours."""
    order = np.array(epoch_order(4000, 1, 0))
    assert abs(np.corrcoef(order, np.arange(4000))[0, 1]) < 5 / np.sqrt(4000)
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 5 / np.sqrt(4000)


def test_the_last_of_very_many_rows_comes_without_going_through_them() -> None:
    """More than any machine could count: what is linear in them never ends here."""
    rows = 10**15
    stream = RowStream(rows, 7, shuffle=True)
    found = stream.rows(4 * rows - 1, 4 * rows + 3)
    assert found[0] == row_at(rows - 1, rows, 7, 3)
    assert found[1:] == [row_at(place, rows, 7, 4) for place in range(3)]


@given(st.integers(1, 12), st.integers(1, 9), st.integers(0, 30), st.booleans())
def test_a_resumed_stream_goes_on_where_an_unbroken_one_would(
    num_rows: int, rows_per_update: int, stopped_after: int, shuffle: bool
) -> None:
    stream = RowStream(num_rows, 7, shuffle)
    updates = [rows_of_update(stream, i, rows_per_update) for i in range(stopped_after + 3)]
    taken = stopped_after * rows_per_update
    for i in range(3):
        again = rows_of_update(stream, i, rows_per_update, first_row=taken)
        assert again == updates[stopped_after + i]
    flat = [row for update in updates for row in update]
    assert flat == [stream.rows(g, g + 1)[0] for g in range(len(flat))]


def test_without_shuffling_rows_come_round_in_the_order_of_the_file() -> None:
    stream = RowStream(5, 0, shuffle=False)
    updates = [rows_of_update(stream, i, 3) for i in range(4)]
    assert updates == [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1]]
    assert rows_of_update(stream, 0, 12) == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


def test_a_run_of_whole_epochs_ends_with_a_smaller_update() -> None:
    stream = RowStream(5, 0, shuffle=False)
    updates = [rows_of_update(stream, i, 4, total_rows=10) for i in range(4)]
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
