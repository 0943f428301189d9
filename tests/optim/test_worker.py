"""A tile updated by many threads from pieces has the bits of a tile updated at once by one.

And a part that fails is raised in the caller, by name; nothing hangs.
"""

import threading
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.errors import InternalError
from megatrain_cli.model.layout import LayerLayout, make_layout
from megatrain_cli.model.spec import LayerSpec, ParamSpec
from megatrain_cli.optim import worker
from megatrain_cli.optim.adamw import ALL_FORMATS, AdamStep
from megatrain_cli.optim.worker import GRAIN, TileUpdater, decay_matrices_only, split_work
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
STEP = AdamStep(5, 1e-2, 0.9, 0.95, 1e-8, 0.1, grad_scale=0.5, seed=11)
SPLIT = ALL_FORMATS[0]


@pytest.fixture
def small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a small tile is work for many threads."""
    monkeypatch.setattr(worker, "TASK_ELEMENTS", 256)


def make_tile(fmt: TileFormat = SPLIT) -> LayerTile:
    torch.manual_seed(0)
    tile = MasterStore((LAYOUT,), fmt).tiles[0]
    for entry in LAYOUT.entries:
        tile.write_master(entry.param.name, torch.randn(entry.param.shape))
        tile.exp_avg[entry.offset : entry.end] = torch.randn(entry.param.numel) * 1e-2
        tile.exp_avg_sq[entry.offset : entry.end] = torch.rand(entry.param.numel) * 1e-4
    return tile


def make_gradient(tile: LayerTile) -> torch.Tensor:
    """Gaps too have gradients here: they must not reach the tile."""
    torch.manual_seed(1)
    return torch.randn(LAYOUT.numel).to(tile.weights.dtype)


def state_of(tile: LayerTile) -> list[torch.Tensor]:
    all_of_it = (tile.weights, tile.remainder, tile.master, tile.exp_avg, tile.exp_avg_sq)
    return [tensor.view(torch.uint8) for tensor in all_of_it if tensor is not None]


def assert_same_bits(a: LayerTile, b: LayerTile) -> None:
    for left, right in zip(state_of(a), state_of(b), strict=True):
        assert torch.equal(left, right)


@pytest.mark.usefixtures("small_tasks")
@pytest.mark.parametrize("fmt", ALL_FORMATS, ids=lambda fmt: f"{fmt.compute_dtype}-{fmt.master}")
def test_any_thread_count_and_any_pieces_give_the_same_bits(fmt: TileFormat) -> None:
    whole = make_tile(fmt)
    gradient = make_gradient(whole)
    with TileUpdater(1, fmt=fmt) as updater:
        updater.update(whole, gradient, 0, STEP)
    for threads in (1, 2, 3, 5):
        with TileUpdater(threads, fmt=fmt) as updater:
            # The second has borders inside parameters, off the grain, and in a gap.
            for borders in ([0, LAYOUT.numel], [0, 40, 200, 1031, 10_000, 10_137, LAYOUT.numel]):
                tile = make_tile(fmt)
                for start, end in pairwise(borders):
                    updater.update(tile, gradient[start:end], start, STEP)
                assert_same_bits(tile, whole)


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


@pytest.mark.usefixtures("small_tasks")
def test_a_failing_part_is_raised_by_name_and_the_updater_lives_on() -> None:
    def decay(param: ParamSpec) -> bool:
        if param.name == "up.bias":
            raise ZeroDivisionError("no luck")
        return True

    tile = make_tile()
    with TileUpdater(3, decay, SPLIT) as updater:
        with pytest.raises(
            InternalError, match=r"up\.bias of layer-00003 failed: no luck"
        ) as error:
            updater.update(tile, make_gradient(tile), 0, STEP)
        assert isinstance(error.value.__cause__, ZeroDivisionError)
        updater.update(tile, make_gradient(tile)[:37], 0, STEP)


@pytest.mark.usefixtures("small_tasks")
def test_when_a_failure_is_raised_no_thread_touches_the_tile_any_more() -> None:
    started, finished = [], []

    def decay(param: ParamSpec) -> bool:
        if param.name == "norm.weight":
            raise ZeroDivisionError
        started.append(param.name)
        sum(range(10**6))  # still busy when the other task fails
        finished.append(param.name)
        return True

    tile = make_tile()
    with TileUpdater(2, decay, SPLIT) as updater:
        with pytest.raises(InternalError, match=r"norm\.weight"):
            updater.update(tile, make_gradient(tile), 0, STEP)
        assert sorted(started) == sorted(finished)
        after = [tensor.clone() for tensor in state_of(tile)]
        updater.close()  # waits for the threads: whatever they still had to do is done then
        for then, now in zip(after, state_of(tile), strict=True):
            assert torch.equal(then, now)


def test_a_piece_that_does_not_fit_is_a_bug() -> None:
    tile = make_tile()
    with TileUpdater(1, fmt=SPLIT) as updater:
        with pytest.raises(InternalError, match="of a tile of"):
            updater.update(tile, make_gradient(tile), 64, STEP)
        with pytest.raises(InternalError, match=r"gradients of torch\.float32"):
            updater.update(tile, make_gradient(tile).float(), 0, STEP)


def test_closing_ends_the_threads() -> None:
    before = threading.active_count()
    tile = make_tile()
    updater = TileUpdater(4, fmt=SPLIT)
    updater.update(tile, make_gradient(tile), 0, STEP)
    updater.close()
    updater.close()
    assert threading.active_count() == before
    with pytest.raises(InternalError, match="closed"):
        updater.update(tile, make_gradient(tile), 0, STEP)


def layout_of(sizes: list[int]) -> LayerLayout:
    params = tuple(ParamSpec(f"p{i}", (size,)) for i, size in enumerate(sizes))
    return make_layout(LayerSpec("layer", "layer", params))


@given(
    st.lists(st.integers(1, 1 << 21), min_size=1, max_size=8),
    st.integers(1, 16),
    st.data(),
)
def test_tasks_cover_each_parameter_once_and_are_cut_on_the_grain(
    sizes: list[int], threads: int, data: st.DataObject
) -> None:
    layout = layout_of(sizes)
    start = data.draw(st.integers(0, layout.numel))
    end = data.draw(st.integers(start, layout.numel))
    tasks = split_work(layout, start, end, threads)
    segments = [segment for task in tasks for segment in task]
    at = start
    for segment in segments:
        entry = layout.by_name[segment.param.name]
        assert max(at, entry.offset) <= segment.start < segment.end <= entry.end
        at = segment.end
        assert segment.end in (entry.end, end) or segment.end % GRAIN == 0
        assert segment.start in (entry.offset, start) or segment.start % GRAIN == 0
    in_parameters = sum(
        max(0, min(end, entry.end) - max(start, entry.offset)) for entry in layout.entries
    )
    assert sum(segment.end - segment.start for segment in segments) == in_parameters
    for task in tasks[:-1]:
        assert sum(segment.end - segment.start for segment in task) >= worker.TASK_ELEMENTS


def test_a_large_piece_is_work_for_every_thread() -> None:
    tasks = split_work(layout_of([1 << 26]), 0, 1 << 26, 16)
    assert 4 * 16 - 4 <= len(tasks) <= 4 * 16
