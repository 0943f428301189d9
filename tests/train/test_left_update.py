"""An update that is left undone keeps its gradients while the step behind it still computes."""

import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain_cli.plan.plan import RunPlan
from megatrain_cli.train.loop import Run
from megatrain_cli.train.step import StepUpdate, UpdateStop, finish_update
from tests.train.threaded import use_threads
from tests.train.workspace import digest, make_workspace, start

LEFT = 2  # the step


@pytest.mark.parametrize("slabs", [False, True])
@pytest.mark.parametrize("num_updated", [0, 2])
def test_the_step_behind_a_left_update_leaves_its_gradients_alone(
    num_updated: int, slabs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_threads(monkeypatch)

    def adjust(plan: RunPlan) -> RunPlan:
        decisions = replace(plan.decisions, num_slabs=2 if slabs else 0, slab_numel=1024)
        return replace(plan, decisions=decisions)

    config = make_workspace(tmp_path, train={"max_steps": LEFT})
    with start(config, adjust=adjust) as run:
        records = list(run.steps())
        run.engine.lanes.drain()
        whole = digest(run.engine.store)

    recorded, enough = threading.Event(), threading.Event()
    inner = StepUpdate.update
    begun: list[int] = []

    def update(
        self: StepUpdate, layer: int, gradient: torch.Tensor, start: int, squared_norm: float
    ) -> Future[Any] | None:
        if self.step == LEFT:
            begun.append(layer)
            if len(begun) > num_updated:
                enough.set()
                assert recorded.wait(60)
        return inner(self, layer, gradient, start, squared_norm)

    monkeypatch.setattr(StepUpdate, "update", update)
    stop = UpdateStop(lambda step: recorded.is_set())
    with start(config, [f"train.max_steps={LEFT + 1}"], adjust=adjust) as run:
        rest = Run(run.loaded, run.engine, run.rows, stop=stop)
        steps = rest.steps()
        assert [next(steps).loss for _ in records] == [record.loss for record in records]
        assert enough.wait(60)
        recorded.set()
        assert list(steps) == []  # a step was issued all the same, as main hears of it too late
        run.engine.lanes.drain()
        left = rest.landed
        assert left is not None
        assert left.step == LEFT
        assert run.engine.store.clock.steps.count(LEFT) == num_updated
        finish_update(run.engine.store, run.engine.updater, left.scalars)
        assert digest(run.engine.store) == whole
