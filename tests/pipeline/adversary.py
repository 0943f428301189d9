"""Lanes that run ops in any order the schedule's waits allow, chosen by a seed.

One thread, no clock: whenever something has to have happened, one lane whose next op has nothing
left to wait for is picked at random and runs that op. A missing wait lets some seed run an op too
early, and what it computes is then wrong.
"""

import random
from collections import deque

import torch

from megatrain_cli.pipeline.lanes import InlineMark, Work
from megatrain_cli.pipeline.ops import Event, Lane, Op


class AdversarialLanes:
    """Every interleaving of the four lanes is possible, none is favoured.

    Args:
        seed: Which interleaving.
        favour: A lane that always goes first when it can: it runs as far ahead as waits allow.
    """

    def __init__(self, seed: int, favour: Lane | None = None) -> None:
        self._random = random.Random(seed)
        self._favour = favour
        self._queues: dict[Lane, deque[tuple[int, tuple[int, ...], Work]]] = {
            lane: deque() for lane in Lane
        }
        self._latest: dict[Event, int] = {}
        self._done: set[int] = set()
        self._count = 0

    def submit(self, op: Op, work: Work) -> None:
        held = tuple(self._latest[event] for event in op.waits if event in self._latest)
        self._queues[op.lane].append((self._count, held, work))
        self._latest.update(dict.fromkeys(op.records, self._count))
        self._count += 1

    def mark(self) -> InlineMark:
        return InlineMark()

    def fence(self) -> "HostFence":
        queue = self._queues[Lane.HOST]
        return HostFence(self, queue[-1][0] if queue else None)

    def drain(self) -> None:
        while any(self._queues.values()):
            self._run_one()

    def close(self) -> None:
        pass

    def run_until(self, number: int) -> None:
        while number not in self._done:
            self._run_one()

    def _run_one(self) -> None:
        ready = [
            lane
            for lane, queue in self._queues.items()
            if queue and self._done.issuperset(queue[0][1])
        ]
        assert ready, "deadlock: every lane waits"
        lane = self._favour if self._favour in ready else self._random.choice(ready)
        assert lane is not None
        number, _, work = self._queues[lane].popleft()
        with torch.set_grad_enabled(True):
            work()
        self._done.add(number)


class HostFence:
    def __init__(self, lanes: AdversarialLanes, number: int | None) -> None:
        self._lanes, self._number = lanes, number

    def wait(self) -> None:
        if self._number is not None:
            self._lanes.run_until(self._number)
