"""Lanes that run ops in any order the schedule's waits allow, chosen by a seed.

One thread, no clock: whenever something has to have happened, one lane whose next op has nothing
left to wait for is picked at random and runs that op; or an update that has begun is picked, and
ends. A missing wait lets some seed run an op too early, and what it computes is then wrong.
"""

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.pipeline.lanes import InlineMark, Pending, Work
from megatrain_cli.pipeline.ops import Event, Lane, Op
from megatrain_cli.pipeline.trace import Span


class AdversarialLanes:
    """Every interleaving of the lanes is possible, none is favoured.

    Args:
        seed: Which interleaving.
        favour: A lane that always goes first when it can: it runs as far ahead as waits allow.
    """

    num_ended = 0  # nobody watches

    def __init__(self, seed: int, favour: Lane | None = None) -> None:
        self._random = random.Random(seed)
        self._favour = favour
        self._queues: dict[Lane, deque[tuple[int, tuple[int, ...], Work]]] = {
            lane: deque() for lane in Lane
        }
        self._latest: dict[Event, int] = {}
        self._last: dict[Lane, int] = {}
        self._begun: dict[int, Pending] = {}  # updates that have not ended
        self._retiring: deque[int] = deque()  # updates without a record, in the order of the list
        self._done: set[int] = set()
        self._count = 0

    def submit(self, op: Op, work: Work, num_bytes: int = 0) -> None:
        del num_bytes
        held = tuple(self._latest[event] for event in op.waits if event in self._latest)
        self._queues[op.lane].append((self._count, held, work))
        self._latest.update(dict.fromkeys(op.records, self._count))
        self._last[op.lane] = self._count
        self._count += 1

    def mark(self) -> InlineMark:
        return InlineMark()

    def fence(self) -> "HostFence":
        return HostFence(
            self, {self._last[lane] for lane in (Lane.HOST, Lane.UPDATE) if lane in self._last}
        )

    def take_spans(self) -> list[Span]:
        return []

    def drain(self) -> None:
        self.run_until(set(range(self._count)))

    def halt(self) -> None:
        """Nothing runs outside of calls."""

    def close(self) -> None:
        pass

    def run_until(self, numbers: set[int]) -> None:
        while not self._done.issuperset(numbers):
            self._run_one()

    def _run_one(self) -> None:
        ready = [
            lane
            for lane, queue in self._queues.items()
            if queue and self._done.issuperset(queue[0][1])
        ]
        assert ready or self._begun, "deadlock: every lane waits"
        choice = self._favour
        if choice not in ready:
            choice = self._random.choice([*ready, *([None] if self._begun else [])])
        if choice is None:
            self._end_one()
            return
        number, _, work = self._queues[choice].popleft()
        with torch.set_grad_enabled(True):
            pending = work()
        if choice is not Lane.UPDATE:
            self._done.add(number)
            return
        self._retiring.append(number)
        self._begun[number] = pending or Lazy(lambda: None)

    def _end_one(self) -> None:
        number = self._random.choice(list(self._begun))
        self._begun.pop(number).result()
        while self._retiring and self._retiring[0] not in self._begun:
            self._done.add(self._retiring.popleft())


class Lazy:
    """Work that is done when somebody asks for its end."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._then: list[Callable[[Any], object]] = []

    def result(self) -> None:
        self._work()
        for fn in self._then:
            fn(self)

    def add_done_callback(self, fn: Callable[[Any], object], /) -> None:
        self._then.append(fn)


class HostFence:
    def __init__(self, lanes: AdversarialLanes, numbers: set[int]) -> None:
        self._lanes, self._numbers = lanes, numbers

    def wait(self) -> None:
        self._lanes.run_until(self._numbers)


any_order = given(
    seed=st.integers(0, 2**32),
    favour=st.sampled_from([None, *Lane]),
    later=st.sampled_from([None, Lazy]),
)
"""For a test that takes what decides an interleaving: of lanes, and of updates that go on."""
