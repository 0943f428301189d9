"""Which rows are held out: by content and seed, and no row on both sides."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.data.held_out import Documents, hold_out
from megatrain_cli.data.table import Examples

Row = tuple[tuple[int, bool], ...]
rows_of_tokens = st.lists(
    st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=4).map(tuple),
    min_size=1,
    max_size=30,
)


def table(rows: list[Row]) -> Examples:
    flat = [pair for row in rows for pair in row]
    return Examples(
        np.array([token for token, _ in flat], np.int32),
        np.array([target for _, target in flat], np.bool_),
        np.cumsum([0, *map(len, rows)]).astype(np.int64),
    )


def contents(documents: Documents) -> list[tuple[bytes, bytes]]:
    return [
        tuple(part.tobytes() for part in documents.row(i))  # type: ignore[misc]  # of two
        for i in range(len(documents))
    ]


@given(rows_of_tokens, st.floats(0.01, 0.99), st.integers(0, 2**63 - 1))
def test_every_row_is_on_one_side_and_equal_rows_on_the_same(
    rows: list[Row], share: float, seed: int
) -> None:
    trained, held = hold_out(table(rows), share, seed)
    assert trained.ids is not None
    assert held.ids is not None
    assert sorted([*trained.ids.tolist(), *held.ids.tolist()]) == list(range(len(rows)))
    assert set(contents(trained)).isdisjoint(contents(held))
    assert len(held) >= max(1, round(share * len(rows)))


@given(rows_of_tokens, st.randoms(use_true_random=False))
def test_the_order_of_rows_changes_no_rows_side(rows: list[Row], random: object) -> None:
    _, held = hold_out(table(rows), 0.3, 7)
    shuffled = list(rows)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    _, again = hold_out(table(shuffled), 0.3, 7)
    assert sorted(contents(held)) == sorted(contents(again))


def test_of_different_rows_as_many_are_held_out_as_asked_for_and_seeds_differ() -> None:
    rows: list[Row] = [((i, True), (i % 7, True)) for i in range(1000)]
    _, held = hold_out(table(rows), 0.01, 1)
    _, again = hold_out(table(rows), 0.01, 1)
    _, other = hold_out(table(rows), 0.01, 2)
    assert len(held) == len(other) == 10
    assert contents(held) == contents(again)
    assert contents(held) != contents(other)


def test_rows_are_counted_by_source() -> None:
    documents = Documents(table([((1, True),)] * 6), np.array([0, 2, 3, 5]))
    assert documents.by_source((2, 0, 3, 1)) == (1, 0, 2, 1)
    assert Documents(documents.examples).by_source((2, 0, 3, 1)) == (2, 0, 3, 1)
    assert documents.lengths.tolist() == [1, 1, 1, 1]
