"""Packs hold every document once and whole, fill their rows, and follow from their inputs alone."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatrain_cli.data.first_fit import first_fit
from megatrain_cli.data.pack import Packs, pack_documents
from megatrain_cli.data.sampler import packing_order
from megatrain_cli.errors import InternalError

CAPACITY = 32
lengths_of = st.lists(st.integers(1, CAPACITY), min_size=1, max_size=80)


def pack(lengths: list[int], window: int = 1 << 16, seed: int | None = None) -> Packs:
    count = len(lengths)
    order = np.arange(count) if seed is None else packing_order(count, seed)
    return pack_documents(np.array(lengths), [order], CAPACITY, window)


def rows(packs: Packs) -> list[list[int]]:
    return [packs.row(i) for i in range(len(packs))]


def plain_first_fit(sizes: list[int], capacity: int) -> list[int]:
    """The rule in its plainest form."""
    room: list[int] = []
    found = []
    for size in sizes:
        bin_ = next((i for i, left in enumerate(room) if left >= size), len(room))
        if bin_ == len(room):
            room.append(capacity)
        room[bin_] -= size
        found.append(bin_)
    return found


def plain_packs(lengths: list[int], order: list[int], window: int) -> list[list[int]]:
    """First-fit decreasing, window after window."""
    found = []
    for start in range(0, len(order), window):
        chosen = order[start : start + window]
        by_size = sorted(range(len(chosen)), key=lambda i: -lengths[chosen[i]])
        bins = plain_first_fit([lengths[chosen[i]] for i in by_size], CAPACITY)
        made: dict[int, list[int]] = {}
        for place, bin_ in zip(by_size, bins, strict=True):
            made.setdefault(bin_, []).append(place)
        found += [[chosen[i] for i in sorted(row)] for row in sorted(made.values(), key=min)]
    return found


@given(st.lists(st.integers(1, 20), max_size=60))
def test_the_tree_finds_the_first_bin_with_room(sizes: list[int]) -> None:
    assert first_fit(np.array(sizes, np.int64), 20).tolist() == plain_first_fit(sizes, 20)


@given(lengths_of, st.integers(1, 30), st.integers(0, 5))
def test_packs_are_those_of_the_plain_rule(lengths: list[int], window: int, seed: int) -> None:
    order = packing_order(len(lengths), seed).tolist()
    assert rows(pack(lengths, window, seed)) == plain_packs(lengths, order, window)


@given(lengths_of, st.integers(1, 30))
def test_every_document_is_there_once_and_whole_and_no_row_is_too_long(
    lengths: list[int], window: int
) -> None:
    packs = pack(lengths, window)
    assert sorted(packs.documents.tolist()) == list(range(len(lengths)))
    sums = [sum(lengths[i] for i in row) for row in rows(packs)]
    assert sums == packs.lengths.tolist()
    assert max(sums) <= CAPACITY
    assert packs.efficiency == pytest.approx(sum(lengths) / (len(packs) * CAPACITY))


@given(lengths_of)
def test_rows_are_few(lengths: list[int]) -> None:
    """What is proved of first-fit decreasing, against a bound on the best there is."""
    large = sum(2 * length > CAPACITY for length in lengths)
    best = max(-(-sum(lengths) // CAPACITY), large)
    assert len(pack(lengths)) <= max(best, 11 / 9 * (best + large) + 6 / 9)
    half_empty = sum(length * 2 <= CAPACITY for length in pack(lengths).lengths.tolist())
    assert half_empty <= 1  # or the documents of two rows would have shared one


@pytest.mark.parametrize("median", [12, 60, 250])
def test_rows_of_usual_documents_are_full(median: int) -> None:
    drawn = np.random.default_rng(0).lognormal(np.log(median), 0.8, 20_000)
    lengths = np.clip(drawn.astype(np.int64), 1, 1024)
    packs = pack_documents(lengths, [packing_order(len(lengths), 1)], 1024)
    assert packs.efficiency > 0.99
    assert "20000 documents packed into" in packs.line()


@given(lengths_of, lengths_of, st.integers(1, 30))
def test_a_window_packs_its_own_documents_alone(
    before: list[int], after: list[int], window: int
) -> None:
    whole = before[: len(before) // window * window]
    first, both = pack(whole or [1], window), pack((whole or [1] * window) + after, window)
    if whole:
        assert rows(both)[: len(first)] == rows(first)


@given(st.lists(lengths_of, min_size=1, max_size=4), st.integers(1, 30))
def test_parts_are_packed_as_if_each_were_alone(parts: list[list[int]], window: int) -> None:
    together = pack_documents(
        np.array([length for part in parts for length in part]),
        [packing_order(len(part), 4) for part in parts],
        CAPACITY,
        window,
    )
    alone = [pack(part, window, seed=4) for part in parts]
    assert together.rows_by_part == tuple(len(packs) for packs in alone)
    expected, begin = [], 0
    for part, packs in zip(parts, alone, strict=True):
        expected += [[begin + i for i in row] for row in rows(packs)]
        begin += len(part)
    assert rows(together) == expected


def test_without_shuffling_rows_come_in_the_order_of_the_files() -> None:
    assert rows(pack([20, 30, 10, 2, 5])) == [[0, 2], [1, 3], [4]]


def test_documents_that_do_not_fit_are_a_bug() -> None:
    for lengths in ([CAPACITY + 1], [0], []):
        with pytest.raises(InternalError, match="rows of 32 tokens"):
            pack(lengths)


def test_another_process_makes_the_same_packs(tmp_path: Path) -> None:
    lengths = np.random.default_rng(3).integers(1, 33, 500)
    mine = pack_documents(lengths, [packing_order(500, 9)], CAPACITY, 100)
    np.save(tmp_path / "lengths.npy", lengths)
    code = (
        "import sys, numpy as np; from megatrain_cli.data import pack, sampler; "
        f"n = np.load({str(tmp_path / 'lengths.npy')!r}); "
        f"p = pack.pack_documents(n, [sampler.packing_order(500, 9)], {CAPACITY}, 100); "
        "np.save(sys.argv[1], p.documents); sys.exit(len(p) != int(sys.argv[2]))"
    )
    out = str(tmp_path / "packs.npy")
    command = [sys.executable, "-c", code, out, str(len(mine))]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    theirs: NDArray[np.int64] = np.load(out)
    assert theirs.tolist() == mine.documents.tolist()


@given(lengths_of)
def test_sums_over_documents_are_in_the_order_of_rows(lengths: list[int]) -> None:
    packs = pack(lengths, seed=7)
    assert packs.sums(np.array(lengths, np.int32)).tolist() == packs.lengths.tolist()
