"""What a run knows of its saves when it begins the next one."""

import threading
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from megatrain_cli.checkpoint.save import Saver, SaveReport, Snapshot
from megatrain_cli.train.saving import Saving
from tests.checkpoint.tiles import manifest_of
from tests.train.here import train_here
from tests.train.workspace import make_workspace


def test_a_save_that_has_just_ended_is_the_parent_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if its report is not there yet: the saver's thread is held up right before it."""
    ended, asked = threading.Event(), threading.Event()

    class Box(deque[Any]):
        def append(self, outcome: Any) -> None:
            ended.set()
            assert asked.wait(60)
            super().append(outcome)

    init, begin, wait, after_step = Saver.__init__, Saver.begin, Saver.wait, Saving.after_step

    def make(self: Saver, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self._box = Box()

    def begin_and_tell(self: Saver, snapshot: Snapshot) -> bool:
        if snapshot.facts.step > 1:
            asked.set()
        return begin(self, snapshot)

    def wait_and_tell(self: Saver) -> list[SaveReport]:
        asked.set()
        return wait(self)

    def when_it_has_ended(self: Saving, step: int, loss: float, *, asked: bool = False) -> None:
        assert step == 1 or ended.wait(60)
        after_step(self, step, loss, asked=asked)

    monkeypatch.setattr(Saver, "__init__", make)
    monkeypatch.setattr(Saver, "begin", begin_and_tell)
    monkeypatch.setattr(Saver, "wait", wait_and_tell)
    monkeypatch.setattr(Saving, "after_step", when_it_has_ended)
    train_here(make_workspace(tmp_path, train={"max_steps": 2}, checkpoint={"save_steps": 1}))
    first, second = (
        manifest_of(tmp_path / "run" / "checkpoints" / f"step-{step:08d}") for step in (1, 2)
    )
    assert second.parent == first.id
