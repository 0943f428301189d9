"""What the host does for one optimizer step: check it, clip it, update every layer."""

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import torch

from megatrain_cli.errors import MixedStateError, NumericsError
from megatrain_cli.model.spec import ModelSpec
from megatrain_cli.optim.adamw import AdamStep
from megatrain_cli.optim.clip import clip_coefficient, global_norm
from megatrain_cli.optim.crew import WorkSpan
from megatrain_cli.optim.worker import TileUpdater
from megatrain_cli.store.master import MasterStore


class UpdateStop:
    """Whether the rest of an update is to be left undone; for all steps of a run.

    Only a step whose gradients have all landed is left half updated: a later run can finish it.

    Attributes:
        at: The step that was left so; None while there is none.

    Args:
        wanted: Asked with the step before each layer's update, on the thread of the updates.
    """

    def __init__(self, wanted: Callable[[int], bool] = lambda step: False) -> None:
        self.at: int | None = None
        self._wanted = wanted

    def stops(self, step: int, *, landed: bool) -> bool:
        """Whether the next layer of this step must not be updated."""
        if self.at is None and landed and self._wanted(step):
            self.at = step
        return self.at is not None


_ADVICE = "Lower `optimizer.learning_rate`, add warm-up, or look at the rows of this step."


class StepUpdate:
    """The host work of one step; `loss` and `grad_norm` are known once `clip` has returned.

    Args:
        step: The step's number in the run, from 1.
        base: The optimizer's scalars; the clip coefficient joins them in `clip`.
        eager: Layers are updated before the global norm is known.
        stop: May leave the rest of the layers as they are.
        landed: Whether all gradients are in their tiles when the first update begins.

    Attributes:
        step: As given.
        landed: All gradients are in their tiles, or are when the first update begins.
    """

    def __init__(
        self,
        *,
        step: int,
        base: AdamStep,
        max_grad_norm: float | None,
        eager: bool,
        spec: ModelSpec,
        store: MasterStore,
        updater: TileUpdater,
        stop: UpdateStop | None = None,
        landed: bool = False,
    ) -> None:
        self.step, self.landed = step, landed
        self.loss = math.nan
        self.grad_norm = math.nan
        self._stop = stop or UpdateStop()
        self._adam, self._max_norm, self._eager = base, max_grad_norm, eager
        self._spec, self._store, self._updater = spec, store, updater
        self._clipped = False
        self._updated: set[int] = set()
        self._left: dict[int, int] = {}  # elements of a layer whose update has not ended
        self._lock = threading.Lock()  # guards `_left`: pieces end on any thread

    def clip(self, loss: float, squared_norms: Sequence[float]) -> None:
        """Find the clip coefficient.

        Raises:
            NumericsError: The loss or a layer's gradient is not finite.
        """
        if not self.wants_gradients():
            return  # computed from weights that were left half updated, it may be anything
        self.loss, self.grad_norm = loss, global_norm(squared_norms)
        if not math.isfinite(loss):
            raise self._refuse(*self._blame(loss))
        for layer, squared in zip(self._spec.layers, squared_norms, strict=True):
            if not math.isfinite(squared):
                raise self._refuse(f"the gradient of {layer.name} is not finite")
        if not math.isfinite(self.grad_norm):
            raise self._refuse(f"the gradient norm is {self.grad_norm}")
        scale = clip_coefficient(self.grad_norm, self._max_norm)
        self._adam = AdamStep(**{**vars(self._adam), "grad_scale": scale})
        self._clipped = True

    def wants_gradients(self) -> bool:
        """Not behind a step that was left: what waits in the tiles is that step's."""
        return self._stop.at is None or self._stop.at >= self.step

    def update(
        self, layer: int, gradient: torch.Tensor, start: int, squared_norm: float
    ) -> Future[WorkSpan] | None:
        """Start to apply AdamW to a piece of a layer's tile; pieces are worked off in order.

        Before a layer's first piece it waits until the tile is loaded and no snapshot needs it.
        Returns None, and leaves the layer as it is, once the update was stopped.
        """
        if self._stop.stops(self.step, landed=self.landed and not self._eager):
            return None
        if not math.isfinite(squared_norm):
            raise self._refuse(f"the gradient of {self._spec.layers[layer].name} is not finite")
        tile = self._store.tiles[layer]
        if layer not in self._updated:
            self._store.clock.begin_update(layer)
            self._left[layer] = tile.layout.numel
            self._updated.add(layer)
        try:
            future = self._updater.submit(tile, gradient, start, self._adam)
        except BaseException:
            self._store.clock.fail_update(layer)
            raise
        future.add_done_callback(partial(self._piece_ended, layer, gradient.numel()))
        return future

    def _piece_ended(self, layer: int, numel: int, done: Future[WorkSpan]) -> None:
        """The update ends with its last piece; runs on a thread of the optimizer."""
        if done.exception() is not None:
            self._store.clock.fail_update(layer)
            return
        with self._lock:
            self._left[layer] -= numel
            ended = not self._left[layer]
        if ended:
            self._store.clock.end_update(layer, self.step)

    def _blame(self, loss: float) -> tuple[str, str]:
        """Why a loss may not be finite, and what to do; weights are looked at only then."""
        for tile in self._store.tiles:
            if not torch.isfinite(tile.weights).all():
                reason = f"the loss is {loss}, and {tile.layout.layer.name} has weights that are"
                advice = _ADVICE if self.step > 1 else "They were read so: get the model again."
                return f"{reason} not finite", advice
        return f"the loss is {loss}", _ADVICE

    def _refuse(self, reason: str, advice: str = _ADVICE) -> NumericsError:
        lead = f"Step {self.step} was refused: {reason}."
        if self._updated:
            return NumericsError(
                f"{lead} `update: eager` had changed {len(self._updated)} of "
                f"{len(self._spec.layers)} layers by then, so the weights in memory belong to no "
                f"step and are not written. {advice}"
            )
        return NumericsError(f"{lead} No update was applied. {advice}")

    @property
    def can_be_finished(self) -> bool:
        """Whether a layer that has not had the update could get it from what its tile holds."""
        return self.landed and self._clipped and not self._eager

    @property
    def scalars(self) -> AdamStep:
        """What the optimizer applies; final once `clip` has returned."""
        return self._adam


def finish_update(store: MasterStore, updater: TileUpdater, step: AdamStep) -> tuple[int, ...]:
    """Do what a stop in the middle of an update left undone.

    Args:
        store: Layers that `step` has not updated yet have its gradient in their tiles.
        updater: Applies it.
        step: The scalars of the interrupted update, its clip coefficient among them.

    Returns:
        The layers that were updated.

    Raises:
        MixedStateError: A layer is of neither this step nor the one before.
    """
    clock = store.clock
    for tile in store.tiles:
        clock.wait_for_state(tile.index)
    rest = [tile for tile, at in zip(store.tiles, clock.steps, strict=True) if at != step.step]
    for tile in rest:
        at, name = clock.step_of(tile.index), tile.layout.layer.name
        if at != step.step - 1 or tile.gradient is None:
            raise MixedStateError(
                f"{name} has had {at} updates and cannot get that of step {step.step}. Go on from "
                "another checkpoint."
            )
    for tile in rest:
        assert tile.gradient is not None
        clock.begin_update(tile.index)
        try:
            updater.update(tile, tile.gradient, 0, step)
        except BaseException:
            clock.fail_update(tile.index)
            raise
        clock.end_update(tile.index, step.step)
    return tuple(tile.index for tile in rest)
