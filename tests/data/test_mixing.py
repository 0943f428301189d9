"""What weights draw: every row as often as its weight says, from any place, at any time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.data.mixing import MixedStream, num_draws
from megatrain_cli.data.sampler import RowStream
from megatrain_cli.errors import InternalError

SIZES = st.lists(st.integers(0, 12), min_size=1, max_size=4).filter(any)
WEIGHTS = st.sampled_from([0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.7])
SEEDS = st.integers(0, 2**64 - 1)


@st.composite
def mixes(draw: st.DrawFn) -> tuple[list[int], list[float]]:
    sizes = draw(SIZES)
    return sizes, [draw(WEIGHTS) for _ in sizes]


@given(sizes=SIZES, seed=SEEDS, shuffle=st.booleans())
def test_with_all_weights_one_it_is_the_order_without_weights(
    sizes: list[int], seed: int, shuffle: bool
) -> None:
    mixed = MixedStream(sizes, [1.0] * len(sizes), seed, shuffle)
    plain = RowStream(sum(sizes), seed, shuffle)
    assert mixed.num_rows == plain.num_rows
    assert mixed.rows(0, 3 * plain.num_rows + 1) == plain.rows(0, 3 * plain.num_rows + 1)


@given(mix=mixes(), seed=SEEDS, shuffle=st.booleans(), epochs=st.integers(1, 5))
def test_at_the_end_of_any_epoch_rows_of_a_source_were_drawn_equally_often(
    mix: tuple[list[int], list[float]], seed: int, shuffle: bool, epochs: int
) -> None:
    sizes, weights = mix
    stream = MixedStream(sizes, weights, seed, shuffle)
    draws = num_draws(sizes, weights)
    assert stream.num_rows == sum(draws)
    rows = stream.rows(0, epochs * stream.num_rows)
    counts = np.bincount(rows, minlength=sum(sizes))
    first = 0
    for size, count in zip(sizes, draws, strict=True):
        of_source = counts[first : first + size]
        assert of_source.sum() == epochs * count, "each epoch has the source's share"
        if size:
            assert of_source.max() - of_source.min() <= 1
        first += size


@given(mix=mixes(), seed=SEEDS, shuffle=st.booleans(), data=st.data())
def test_any_part_of_the_stream_is_found_alone(
    mix: tuple[list[int], list[float]], seed: int, shuffle: bool, data: st.DataObject
) -> None:
    stream = MixedStream(*mix, seed, shuffle)
    end = 3 * stream.num_rows
    whole = stream.rows(0, end)
    start = data.draw(st.integers(0, end))
    stop = data.draw(st.integers(start, end))
    assert MixedStream(*mix, seed, shuffle).rows(start, stop) == whole[start:stop]


def test_weights_as_a_reader_would_expect_them() -> None:
    stream = MixedStream([4, 2], [0.5, 2.0], seed=7, shuffle=True)
    first, second = stream.rows(0, 6), stream.rows(6, 12)
    assert sorted(first)[2:] == sorted(second)[2:] == [4, 4, 5, 5]
    assert sorted(first[:0] + [r for r in first + second if r < 4]) == [0, 1, 2, 3]
    assert first != second
    assert MixedStream([4, 2], [0.5, 2.0], seed=8, shuffle=True).rows(0, 6) != first
    in_order = MixedStream([4, 2], [0.5, 2.0], seed=7, shuffle=False)
    assert in_order.rows(0, 12) == [0, 1, 4, 5, 4, 5, 2, 3, 4, 5, 4, 5]
    assert num_draws([1000, 10, 0], [1e-9, 0.06, 2.0]) == [1, 1, 0]


def test_two_sources_of_one_size_are_not_cut_alike() -> None:
    rows = MixedStream([50, 50], [0.5, 0.5], seed=1, shuffle=True).rows(0, 50)
    halves = [{row for row in rows if row < 50}, {row - 50 for row in rows if row >= 50}]
    assert halves[0] != halves[1]


def test_a_mix_of_nothing_is_a_bug() -> None:
    with pytest.raises(InternalError):
        MixedStream([0, 0], [1.0, 1.0], 0, shuffle=True)
    with pytest.raises(InternalError):
        num_draws([1], [])
