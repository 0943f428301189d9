"""Runs that fail in the middle of an update, while other threads go on."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain_cli.errors import InternalError
from megatrain_cli.report.journal import Journal
from megatrain_cli.report.records import StepRecord
from megatrain_cli.train.step import StepUpdate
from tests.train.here import train_here

FAILS = 2  # the step


def fail_update(
    monkeypatch: pytest.MonkeyPatch, num_updated: int, when: Callable[[], object]
) -> None:
    """Let the update of a step end after some layers, once something has happened."""
    inner = StepUpdate.update
    begun: list[int] = []

    def update(
        self: StepUpdate, layer: int, gradient: torch.Tensor, start: int, squared_norm: float
    ) -> Future[Any] | None:
        if self.step == FAILS:
            begun.append(layer)
            if len(begun) > num_updated:
                assert when() is not False
                raise RuntimeError("no luck")
        return inner(self, layer, gradient, start, squared_norm)

    monkeypatch.setattr(StepUpdate, "update", update)


def leave_half_updated(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a run whose last checkpoint is in the middle of the update of step `FAILS`."""
    recorded = threading.Event()
    write = Journal.write

    def tell(self: Journal, record: StepRecord) -> None:
        write(self, record)
        if record.step == FAILS:
            recorded.set()

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "write", tell)
        fail_update(patch, 2, lambda: recorded.wait(60))
        with pytest.raises(InternalError, match="Step 2 was saved in the middle of its update"):
            train_here(config)
