"""What the host does for one optimizer step: check it, clip it, update every layer."""

import math
from collections.abc import Sequence
from concurrent.futures import Future

import torch

from megatrain_cli.errors import NumericsError
from megatrain_cli.model.spec import ModelSpec
from megatrain_cli.optim.adamw import AdamStep
from megatrain_cli.optim.clip import clip_coefficient, global_norm
from megatrain_cli.optim.crew import WorkSpan
from megatrain_cli.optim.worker import TileUpdater
from megatrain_cli.store.master import MasterStore

_ADVICE = "Lower `optimizer.learning_rate`, add warm-up, or look at the rows of this step."


class StepUpdate:
    """The host work of one step; `loss` and `grad_norm` are known once `clip` has returned.

    Args:
        step: The step's number in the run, from 1.
        base: The optimizer's scalars; the clip coefficient joins them in `clip`.
        eager: Layers are updated before the global norm is known.
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
    ) -> None:
        self.loss = math.nan
        self.grad_norm = math.nan
        self._step, self._adam, self._max_norm, self._eager = step, base, max_grad_norm, eager
        self._spec, self._store, self._updater = spec, store, updater
        self._updated: set[int] = set()

    def clip(self, loss: float, squared_norms: Sequence[float]) -> None:
        """Find the clip coefficient.

        Raises:
            NumericsError: The loss or a layer's gradient is not finite.
        """
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

    def update(
        self, layer: int, gradient: torch.Tensor, start: int, squared_norm: float
    ) -> Future[WorkSpan]:
        """Start to apply AdamW to a piece of a layer's tile; pieces are worked off in order."""
        if not math.isfinite(squared_norm):
            raise self._refuse(f"the gradient of {self._spec.layers[layer].name} is not finite")
        self._updated.add(layer)
        return self._updater.submit(self._store.tiles[layer], gradient, start, self._adam)

    def _blame(self, loss: float) -> tuple[str, str]:
        """Why a loss may not be finite, and what to do; weights are looked at only then."""
        for tile in self._store.tiles:
            if not torch.isfinite(tile.weights).all():
                reason = f"the loss is {loss}, and {tile.layout.layer.name} has weights that are"
                advice = _ADVICE if self._step > 1 else "They were read so: get the model again."
                return f"{reason} not finite", advice
        return f"the loss is {loss}", _ADVICE

    def _refuse(self, reason: str, advice: str = _ADVICE) -> NumericsError:
        lead = f"Step {self._step} was refused: {reason}."
        if self._updated:
            return NumericsError(
                f"{lead} `update: eager` had changed {len(self._updated)} of "
                f"{len(self._spec.layers)} layers by then, so the weights in memory belong to no "
                f"step and are not written. {advice}"
            )
        return NumericsError(f"{lead} No update was applied. {advice}")

    @property
    def untouched(self) -> bool:
        """Whether no layer has been changed by this step."""
        return not self._updated
