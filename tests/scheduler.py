"""Threads that run one at a time and switch only where a test says so, in an order drawn by it.

So an interleaving is a value: the same draws give the same one again, and a deadlock is seen the
moment it happens instead of being waited for.
"""

import random
import threading
from collections.abc import Callable
from typing import Literal


class DeadlockError(Exception):
    """Every thread waits for another."""


class _Stopped(BaseException):
    """Ends a thread that will not be drawn again."""


class Scheduler:
    """Passes one baton among its threads; `gate` and waiting for `condition` hand it on.

    Args:
        seed: Of the order.
    """

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._ready: list[_Task] = []
        self._asleep: list[_Task] = []
        self._done = threading.Event()
        self.stopped = False
        self.failure: BaseException | None = None
        self.condition = Condition(self)

    def spawn(self, work: Callable[[], object]) -> None:
        """Add a thread; it starts when it is drawn."""
        task = _Task()
        self._ready.append(task)
        threading.Thread(target=self._run, args=(task, work), daemon=True).start()

    def run(self) -> None:
        """Start the first thread and return when all have ended; raises the first failure."""
        self._pass_on()
        assert self._done.wait(60)
        if self.failure is not None:
            raise self.failure

    def gate(self) -> None:
        """Maybe let others run before the caller goes on."""
        self._ready.append(_Task.current())
        self._give_up_baton()

    def sleep(self) -> None:
        """Run again only after `wake_all` by another."""
        self._asleep.append(_Task.current())
        self._give_up_baton()

    def wake_all(self) -> None:
        """Everybody who sleeps may be drawn again."""
        self._ready += self._asleep
        self._asleep.clear()

    def _give_up_baton(self) -> None:
        task = _Task.current()
        self._pass_on()
        task.baton.acquire()
        if self.stopped:
            raise _Stopped

    def _pass_on(self) -> None:
        if self._ready and not self.stopped:
            self._ready.pop(self._draw.randrange(len(self._ready))).baton.release()
            return
        if self._asleep and not self.stopped:
            self.failure = DeadlockError(f"{len(self._asleep)} threads wait for each other")
        self.stopped = True
        for task in (*self._ready, *self._asleep):
            task.baton.release()
        self._done.set()

    def _run(self, task: "_Task", work: Callable[[], object]) -> None:
        _own.task = task
        task.baton.acquire()
        if self.stopped:
            return
        try:
            work()
        except _Stopped:
            return
        except Exception as error:  # noqa: BLE001  raised by `run`
            self.failure = self.failure or error
            self.stopped = True
        self._pass_on()


class Condition:
    """Stands in for a `threading.Condition` between threads of one scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._held = False

    def acquire(self) -> Literal[True]:
        assert self._scheduler.stopped or not self._held, "switched while holding the lock"
        self._held = True
        return True

    def release(self) -> None:
        assert self._scheduler.stopped or self._held
        self._held = False

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()

    def wait(self) -> None:
        self.release()
        try:
            self._scheduler.sleep()
        finally:
            self.acquire()

    def notify_all(self) -> None:
        assert self._held
        self._scheduler.wake_all()


class Watched(threading.Condition):
    """Tells when a thread begins to wait."""

    def __init__(self) -> None:
        super().__init__(threading.Lock())
        self.waits = threading.Semaphore(0)

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.release()
        return super().wait(timeout)


class _Task:
    def __init__(self) -> None:
        self.baton = threading.Semaphore(0)

    @staticmethod
    def current() -> "_Task":
        task: _Task = _own.task
        return task


_own = threading.local()
