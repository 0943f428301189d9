"""Tiles updated by many threads, from pieces, all under way at once, have the reference's bits.

And an update that fails fails by name; nothing hangs. `test_crew.py` holds the threads to the rest.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from itertools import pairwise

import numba
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.errors import InternalError
from megatrain_cli.model.layout import LayerLayout, make_layout
from megatrain_cli.model.spec import LayerSpec, ParamSpec
from megatrain_cli.optim import kernels, worker
from megatrain_cli.optim.adamw import ALL_FORMATS, AdamStep
from megatrain_cli.optim.crew import Crew, WorkSpan
from megatrain_cli.optim.reference import adamw_reference, stochastic_bf16
from megatrain_cli.optim.worker import (
    CHUNK_ELEMENTS,
    GRAIN,
    TileUpdater,
    chunk_table,
    decay_matrices_only,
)
from megatrain_cli.plan.tiles import TileFormat
from megatrain_cli.store.master import LayerTile, MasterStore

LAYOUT = make_layout(
    LayerSpec(
        "layer-00003",
        "layer",
        (
            ParamSpec("norm.weight", (37,)),
            ParamSpec("up.weight", (130, 77)),
            ParamSpec("up.bias", (130,)),
            ParamSpec("down.weight", (33, 130)),
        ),
    )
)
# Work for milliseconds even where it is cut at the grain, so that threads do meet.
LARGE = make_layout(
    LayerSpec(
        "layer-00004",
        "layer",
        (ParamSpec("up.weight", (517, 1031)), ParamSpec("bias", (517,)), ParamSpec("norm", (9,))),
    )
)
STEP = AdamStep(5, 1e-2, 0.9, 0.95, 1e-8, 0.1, grad_scale=0.5, seed=11)
SPLIT = ALL_FORMATS[0]


# Borders inside parameters, off the grain, and in a gap.
BORDERS = (0, 40, 200, 1031, 10_000, 10_137, LAYOUT.numel)

each_format = pytest.mark.parametrize(
    "fmt", ALL_FORMATS, ids=lambda fmt: f"{fmt.compute_dtype}-{fmt.master}"
)


@pytest.fixture
def tiny_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a small tile is work for many threads."""
    monkeypatch.setattr(worker, "CHUNK_ELEMENTS", GRAIN)


def make_tiles(
    count: int, fmt: TileFormat = SPLIT, layout: LayerLayout = LAYOUT
) -> tuple[LayerTile, ...]:
    torch.manual_seed(0)
    tiles = MasterStore((layout,) * count, fmt).tiles
    for tile in tiles:
        for entry in layout.entries:
            tile.write_master(entry.param.name, torch.randn(entry.param.shape))
            tile.exp_avg[entry.offset : entry.end] = torch.randn(entry.param.numel) * 1e-2
            tile.exp_avg_sq[entry.offset : entry.end] = torch.rand(entry.param.numel) * 1e-4
    return tiles


def make_tile(fmt: TileFormat = SPLIT) -> LayerTile:
    return make_tiles(1, fmt)[0]


def make_gradient(tile: LayerTile) -> torch.Tensor:
    """Gaps too have gradients here: they must not reach the tile."""
    torch.manual_seed(1)
    return torch.randn(tile.layout.numel).to(tile.weights.dtype)


def state_of(tile: LayerTile) -> list[torch.Tensor]:
    all_of_it = (tile.weights, tile.remainder, tile.master, tile.exp_avg, tile.exp_avg_sq)
    return [tensor.view(torch.uint8) for tensor in all_of_it if tensor is not None]


def assert_same_bits(a: LayerTile, b: LayerTile) -> None:
    for left, right in zip(state_of(a), state_of(b), strict=True):
        assert torch.equal(left, right)


def update_by_reference(tile: LayerTile, gradient: torch.Tensor, step: AdamStep) -> None:
    """The oracle: plain torch, parameter by parameter."""
    for entry in tile.layout.entries:
        name, at = entry.param.name, slice(entry.offset, entry.end)
        master, tile.exp_avg[at], tile.exp_avg_sq[at] = adamw_reference(
            tile.read_master(name).reshape(-1),
            gradient[at],
            tile.exp_avg[at],
            tile.exp_avg_sq[at],
            step,
            decay=decay_matrices_only(entry.param),
        )
        if tile.format.master == "bf16_stochastic":
            key = step.rounding_key(tile.index)
            tile.weights[at] = stochastic_bf16(master, key, entry.offset)
        else:
            tile.write_master(name, master.view(entry.param.shape))


@pytest.mark.usefixtures("tiny_chunks")
@each_format
@pytest.mark.parametrize(
    ("layout", "borders"),
    [(LAYOUT, BORDERS), (LARGE, (0, 40, 300_001, LARGE.numel))],
    ids=["small", "large"],
)
def test_many_updates_under_way_at_once_give_the_bits_of_the_reference(
    fmt: TileFormat, layout: LayerLayout, borders: tuple[int, ...]
) -> None:
    steps = [AdamStep(5 + i, 1e-2, 0.9, 0.95, 1e-8, 0.1, 0.5, seed=11) for i in range(3)]
    expected = make_tiles(3, fmt, layout)
    gradient = make_gradient(expected[0])
    for tile in expected:
        for step in steps:
            update_by_reference(tile, gradient, step)
    for threads in (1, 3, 8):
        tiles = make_tiles(3, fmt, layout)
        with TileUpdater(threads, fmt=fmt) as updater:
            for step in steps:
                futures = [
                    updater.submit(tile, gradient[start:end], start, step)
                    for tile in tiles
                    for start, end in pairwise(borders)
                ]
                for future in futures:
                    future.result()
        for tile, other in zip(tiles, expected, strict=True):
            assert_same_bits(tile, other)


@pytest.mark.usefixtures("tiny_chunks")
def test_a_chunk_that_is_done_twice_or_not_at_all_shows_in_the_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the test above would see if two threads took the same chunk, or none took one."""
    expected = make_tile()
    gradient = make_gradient(expected)
    update_by_reference(expected, gradient, STEP)
    rows = chunk_table(LAYOUT, 0, LAYOUT.numel, decay_matrices_only)
    assert len(rows) == 229
    for table in [np.delete(rows, i, 0) for i in range(0, len(rows), 20)] + [
        np.insert(rows, i, rows[i], 0) for i in range(0, len(rows), 20)
    ]:
        monkeypatch.setattr(worker, "chunk_table", lambda *_, table=table: table)
        tile = make_tile()
        with TileUpdater(2, fmt=SPLIT) as updater:
            updater.update(tile, gradient, 0, STEP)
        assert not torch.equal(tile.exp_avg, expected.exp_avg)


@numba.njit(nogil=True)
def take_tickets(counter: kernels.I64, taken: kernels.I64) -> None:
    ticket = kernels.fetch_add(counter, 1)
    while ticket < taken.size:
        taken[ticket] += 1
        ticket = kernels.fetch_add(counter, 1)


def test_no_ticket_is_handed_out_twice_or_left_out() -> None:
    counter, taken = np.zeros(1, np.int64), np.zeros(1 << 20, np.int64)
    together = threading.Barrier(8)

    def work() -> None:
        together.wait(60)
        take_tickets(counter, taken)

    take_tickets(counter, taken[:0])  # compiles
    counter[0] = 0
    with Crew(8) as crew:
        crew.submit("tickets", work).result()
    assert (taken == 1).all()
    # Luck could hide an addition that another thread can come between; the instruction cannot.
    (code,) = take_tickets.inspect_llvm().values()
    assert code.count("atomicrmw add") == 2


@each_format
def test_nothing_is_compiled_after_the_updater_is_made(fmt: TileFormat) -> None:
    kernel = {
        ("bfloat16", "fp32_split"): kernels.adamw_split,
        ("bfloat16", "bf16"): kernels.adamw_bf16,
        ("bfloat16", "bf16_stochastic"): kernels.adamw_stochastic,
        ("bfloat16", "fp32"): kernels.adamw_fp32_bf16,
        ("float32", "fp32"): kernels.adamw_fp32,
    }[fmt.compute_dtype, fmt.master]
    tile = make_tile(fmt)
    with TileUpdater(2, fmt=fmt) as updater:
        compiled = list(kernel.signatures)  # type: ignore[attr-defined]
        assert compiled
        for start, end in [*pairwise(BORDERS), (3, 4), (37, 38), (5, 5)]:
            updater.update(tile, make_gradient(tile)[start:end], start, STEP)
        assert kernel.signatures == compiled  # type: ignore[attr-defined]


def test_gaps_stay_zero() -> None:
    tile = make_tile()
    with TileUpdater(2, fmt=SPLIT) as updater:
        updater.update(tile, make_gradient(tile), 0, STEP)
    assert len(LAYOUT.gaps) > 1
    for start, end in LAYOUT.gaps:
        for tensor in (tile.weights, tile.remainder, tile.exp_avg, tile.exp_avg_sq):
            assert tensor is not None
            assert not tensor[start:end].any()


def test_only_matrices_decay_unless_told_otherwise() -> None:
    still = AdamStep(1, 0.5, 0.9, 0.9, 1e-8, 0.1)
    for decay, decayed in (
        (decay_matrices_only, {"up.weight", "down.weight"}),
        (lambda _: True, {param.name for param in LAYOUT.layer.params}),
        (lambda param: param.name == "norm.weight", {"norm.weight"}),
    ):
        tile = make_tile()
        tile.exp_avg.zero_()
        before = {p.name: tile.read_master(p.name) for p in LAYOUT.layer.params}
        with TileUpdater(2, decay, SPLIT) as updater:
            updater.update(tile, torch.zeros_like(tile.weights), 0, still)
        for name, master in before.items():
            factor = torch.tensor(0.95 if name in decayed else 1.0)
            assert torch.equal(tile.read_master(name), master * factor), name


def test_an_empty_piece_changes_nothing() -> None:
    tile, untouched = make_tile(), make_tile()
    with TileUpdater(2, fmt=SPLIT) as updater:
        updater.update(tile, torch.empty(0, dtype=torch.bfloat16), 64, STEP)
    assert_same_bits(tile, untouched)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("start", "end", "names"),
    [
        (0, LAYOUT.numel, "norm.weight to down.weight of layer-00003"),
        (200, 300, "up.weight of layer-00003"),
        (37, 40, "layer-00003"),  # in a gap
    ],
)
def test_a_failing_kernel_fails_its_own_update_by_name_and_no_other(
    threads: int, start: int, end: int, names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles, expected = make_tiles(3), make_tiles(3)
    gradient = make_gradient(tiles[0])
    work_on: Callable[..., None] = kernels.adamw_split
    failing = tiles[1].weights.data_ptr() + 2 * start

    def unlucky(work: kernels.Work, weights: kernels.U16, *rest: object) -> None:
        if weights.ctypes.data == failing:
            raise ZeroDivisionError("no luck")
        work_on(work, weights, *rest)

    with TileUpdater(threads, fmt=SPLIT) as updater:
        monkeypatch.setattr(kernels, "adamw_split", unlucky)
        futures = [updater.submit(tile, gradient[start:end], start, STEP) for tile in tiles]
        with pytest.raises(InternalError, match=f"^Updating {names} failed: no luck") as error:
            futures[1].result()
        assert isinstance(error.value.__cause__, ZeroDivisionError)
        for index in (0, 2):
            futures[index].result()
            updater.update(expected[index], gradient[start:end], start, STEP)
    for tile, other in zip(tiles, expected, strict=True):
        assert_same_bits(tile, other)


def test_one_thread_ends_updates_in_the_order_of_submission() -> None:
    ended: list[Future[WorkSpan]] = []
    with TileUpdater(1, fmt=SPLIT) as updater:
        futures = []
        for tile in make_tiles(8):
            futures.append(updater.submit(tile, make_gradient(tile), 0, STEP))
            futures[-1].add_done_callback(ended.append)
    assert ended == futures


def test_closing_finishes_updates_that_are_under_way() -> None:
    tiles, expected = make_tiles(20), make_tiles(20)
    gradient = make_gradient(tiles[0])
    with TileUpdater(2, fmt=SPLIT) as updater:
        for tile in tiles:
            updater.submit(tile, gradient, 0, STEP)
    for tile, other in zip(tiles, expected, strict=True):
        update_by_reference(other, gradient, STEP)
        assert_same_bits(tile, other)
    with pytest.raises(InternalError, match="closed"):
        updater.submit(tiles[0], gradient, 0, STEP)


def test_a_piece_that_does_not_fit_is_a_bug() -> None:
    tile = make_tile()
    with TileUpdater(1, fmt=SPLIT) as updater:
        with pytest.raises(InternalError, match="of a tile of"):
            updater.update(tile, make_gradient(tile), 64, STEP)
        with pytest.raises(InternalError, match=r"gradients of torch\.float32"):
            updater.update(tile, make_gradient(tile).float(), 0, STEP)


def layout_of(sizes: list[int]) -> LayerLayout:
    params = tuple(ParamSpec(f"p{i}", (size,)) for i, size in enumerate(sizes))
    return make_layout(LayerSpec("layer", "layer", params))


@given(st.lists(st.integers(1, 1 << 21), min_size=1, max_size=8), st.data())
def test_chunks_cover_each_parameter_once_and_are_cut_on_the_grain(
    sizes: list[int], data: st.DataObject
) -> None:
    layout = layout_of(sizes)
    start = data.draw(st.integers(0, layout.numel))
    end = data.draw(st.integers(start, layout.numel))
    decayed = data.draw(st.sets(st.sampled_from([param.name for param in layout.layer.params])))
    chunks = chunk_table(layout, start, end, lambda param: param.name in decayed).tolist()
    at = start
    for first, last, decay in chunks:
        (entry,) = (e for e in layout.entries if e.offset <= first < e.end)
        assert at <= first < last <= min(first + CHUNK_ELEMENTS, entry.end, end)
        assert first in (entry.offset, start) or first % GRAIN == 0
        assert last in (entry.end, end) or last % GRAIN == 0
        assert decay == (entry.param.name in decayed)
        at = last
    assert sum(last - first for first, last, _ in chunks) == sum(
        max(0, min(end, entry.end) - max(start, entry.offset)) for entry in layout.entries
    )
