"""A layer's step is counted when all pieces of its update have ended, and not before."""

from concurrent.futures import Future
from typing import Any

import pytest
import torch

from megatrain_cli.errors import InternalError, MixedStateError, NumericsError
from megatrain_cli.model.layout import make_layout
from megatrain_cli.model.spec import LayerSpec, ParamSpec
from megatrain_cli.optim.adamw import AdamStep
from megatrain_cli.optim.worker import TileUpdater
from megatrain_cli.plan.tiles import TileFormat
from megatrain_cli.store.master import LayerTile, MasterStore
from megatrain_cli.train.step import StepUpdate, finish_update

SPLIT = TileFormat("bfloat16", "fp32_split", keep_gradient=True)
LAYOUTS = tuple(
    make_layout(LayerSpec(name, "kind", (ParamSpec(f"{name}.weight", (31, 9)),)))
    for name in ("embed", "layer-00000", "head")
)
ADAM = AdamStep(1, 1e-2, 0.9, 0.95, 1e-8, 0.1, grad_scale=0.5)


class HandUpdater:
    """Updates end when the test says so, in any order."""

    def __init__(self) -> None:
        self.futures: list[Future[Any]] = []

    def submit(self, *args: object) -> Future[Any]:
        self.futures.append(Future())
        return self.futures[-1]


class RefusingUpdater:
    def submit(self, *args: object) -> Future[Any]:
        raise InternalError("does not fit")


def make_step(store: MasterStore, updater: Any, step: int = 1) -> StepUpdate:
    spec: Any = type("Spec", (), {"layers": [layout.layer for layout in LAYOUTS]})()
    return StepUpdate(
        step=step,
        base=ADAM,
        max_grad_norm=None,
        eager=True,
        spec=spec,
        store=store,
        updater=updater,
    )


def in_pieces(step: StepUpdate, tile: LayerTile, cut: int) -> None:
    step.update(tile.index, tile.weights[:cut], 0, 1.0)
    step.update(tile.index, tile.weights[cut:], cut, 1.0)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_layer_is_a_step_further_when_its_last_piece_has_ended(order: tuple[int, int]) -> None:
    store, updater = MasterStore(LAYOUTS, SPLIT), HandUpdater()
    in_pieces(make_step(store, updater), store.tiles[1], 128)
    updater.futures[order[0]].set_result(None)
    assert store.clock.steps == (0, 0, 0)
    with pytest.raises(MixedStateError, match="has had 1 updates, not 0"):
        store.clock.hold(0)
    updater.futures[order[1]].set_result(None)
    assert store.clock.steps == (0, 1, 0)


def test_a_piece_that_fails_leaves_a_tile_that_is_never_saved() -> None:
    store, updater = MasterStore(LAYOUTS, SPLIT), HandUpdater()
    in_pieces(make_step(store, updater), store.tiles[0], 128)
    updater.futures[0].set_exception(InternalError("a bad core"))
    updater.futures[1].set_result(None)
    assert store.clock.steps == (0, 0, 0)
    with pytest.raises(MixedStateError, match="embed was left in the middle of an update"):
        store.clock.hold(0)


def test_an_update_that_cannot_be_submitted_leaves_a_tile_that_is_never_saved() -> None:
    store = MasterStore(LAYOUTS, SPLIT)
    step = make_step(store, RefusingUpdater())
    with pytest.raises(InternalError, match="does not fit"):
        step.update(0, store.tiles[0].weights, 0, 1.0)
    with pytest.raises(MixedStateError, match="in the middle"):
        store.clock.hold(1)


def test_a_gradient_that_is_refused_touches_no_tile() -> None:
    store = MasterStore(LAYOUTS, SPLIT)
    step = make_step(store, HandUpdater())
    with pytest.raises(NumericsError, match="the gradient of embed is not finite"):
        step.update(0, store.tiles[0].weights, 0, float("nan"))
    store.clock.drop(store.clock.hold(0))


def test_updates_that_are_refused_are_not_counted_as_begun() -> None:
    store = MasterStore(LAYOUTS, SPLIT)
    step = make_step(store, HandUpdater())
    store.clock.refuse_updates(RuntimeError("stop"))
    with pytest.raises(RuntimeError, match="stop"):
        step.update(0, store.tiles[0].weights, 0, 1.0)
    assert store.clock.steps == (0,) * len(LAYOUTS)


@pytest.fixture(scope="module")
def updater() -> Any:
    with TileUpdater(1, fmt=SPLIT) as made:
        yield made


def filled() -> MasterStore:
    store = MasterStore(LAYOUTS, SPLIT)
    draw = torch.Generator().manual_seed(0)
    for tile in store.tiles:
        assert tile.gradient is not None
        for entry in tile.layout.entries:
            tile.write_master(entry.param.name, torch.randn(entry.param.shape, generator=draw))
            at = slice(entry.offset, entry.end)
            tile.gradient[at] = torch.randn(entry.param.numel, generator=draw)
    return store


def test_an_update_that_was_interrupted_is_finished_to_the_last_bit(updater: TileUpdater) -> None:
    whole, broken = filled(), filled()
    assert finish_update(whole, updater, ADAM) == (0, 1, 2)
    tile = broken.tiles[1]
    assert tile.gradient is not None
    broken.clock.begin_update(1)
    updater.update(tile, tile.gradient, 0, ADAM)
    broken.clock.end_update(1, 1)
    assert finish_update(broken, updater, ADAM) == (0, 2)
    assert finish_update(broken, updater, ADAM) == ()
    assert broken.clock.steps == (1, 1, 1)
    for one, other in zip(whole.tiles, broken.tiles, strict=True):
        for name in ("weights", "remainder", "exp_avg", "exp_avg_sq"):
            pair = getattr(one, name), getattr(other, name)
            assert torch.equal(*(flat.view(torch.uint8) for flat in pair))


def test_a_layer_that_is_not_one_update_behind_cannot_be_finished(updater: TileUpdater) -> None:
    store = filled()
    store.clock.set_steps((1, 2, 1))
    with pytest.raises(MixedStateError, match=r"layer-00000 has had 2 updates"):
        finish_update(store, updater, ADAM)
    assert store.clock.steps == (1, 2, 1)


def test_an_update_that_fails_while_it_is_finished_leaves_a_torn_tile() -> None:
    class Broken:
        def update(self, *args: object) -> None:
            raise InternalError("a bad core")

    broken: Any = Broken()
    store = filled()
    with pytest.raises(InternalError, match="a bad core"):
        finish_update(store, broken, ADAM)
    with pytest.raises(MixedStateError, match="embed was left in the middle"):
        store.clock.hold(1)
