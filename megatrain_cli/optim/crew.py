"""Threads that work on a job together and then, each for itself, go on to the next.

There is no wait between two jobs: a thread that finds nothing left to do in one starts the next
while others still finish their share. So the cores stay busy through the tail of every job.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from megatrain_cli.errors import InternalError


@dataclass(frozen=True)
class WorkSpan:
    """When a job was worked on, by `time.perf_counter`.

    Attributes:
        began: The first thread took it up.
        ended: The last thread was done with it.
    """

    began: float
    ended: float

    @property
    def seconds(self) -> float:
        """From its beginning to its end. Jobs that follow each other overlap a little."""
        return self.ended - self.began


class Crew:
    """Threads that wait, without spinning, for jobs and work on them in the order of submission.

    Args:
        threads: How many.
        cores: Those that all of the threads are bound to; None leaves them where the system puts
            them, as do systems that cannot bind threads.
    """

    def __init__(self, threads: int, cores: Sequence[int] | None = None) -> None:
        if threads < 1:
            raise InternalError(f"A crew of {threads} threads.")
        bind = cores is not None and hasattr(os, "sched_setaffinity")
        if bind and not (cores and set(cores) <= os.sched_getaffinity(0)):
            raise InternalError(f"Cores {cores} are not among {sorted(os.sched_getaffinity(0))}.")
        # Guards `_jobs`, `_closed` and the state of every job.
        self._changed = threading.Condition(threading.Lock())
        self._jobs: deque[_Job] = deque()
        self._closed = False
        # Daemons, so that an owner who forgets `close` does not keep the process from ending.
        self._threads = [
            threading.Thread(target=self._run, name=f"adam-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()
            if bind and cores is not None and thread.native_id is not None:
                # Linux takes the id of a thread here: sched_setaffinity(2).
                os.sched_setaffinity(thread.native_id, cores)

    def submit(self, name: str, work: Callable[[], None]) -> Future[WorkSpan]:
        """Start a job; returns at once.

        The job is done when `work` has returned to every thread that called it. If it raises in
        one of them, no more threads begin it, and the future fails when the last has left.

        Args:
            name: What the job does, for the message if it fails.
            work: Called by any number of threads, at the same time or one after the other. Returns
                when nothing is left to hand out, though others may still be at their share.

        Returns:
            A future that cannot be cancelled. Its callbacks run on one of the crew's threads and
            hold up its work: they must be short, must not raise and must not wait for other jobs.
        """
        job = _Job(name, work)
        with self._changed:
            if self._closed:
                raise InternalError(f"{name} was asked of a crew that is closed.")
            self._jobs.append(job)
            self._changed.notify_all()
        return job.future

    def close(self) -> None:
        """Finish what was submitted, then end the threads; calling it again does nothing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self) -> None:
        while self._work_once():
            pass

    def _work_once(self) -> bool:
        # A function of its own, so that a waiting thread holds on to no job and its memory.
        job = self._join_first()
        if job is None:
            return False
        error: BaseException | None = None
        try:
            job.work()
        except BaseException as caught:  # noqa: BLE001  raised where the future is asked
            error = caught
        if self._leave(job, error):
            job.finish()
        return True

    def _join_first(self) -> "_Job | None":
        """Wait for a job and join it; None once the crew is closed and all jobs are taken."""
        with self._changed:
            while not self._jobs:
                if self._closed:
                    return None
                self._changed.wait()
            job = self._jobs[0]
            if job.began is None:
                job.began = time.perf_counter()
            job.inside += 1
            return job

    def _leave(self, job: "_Job", error: BaseException | None) -> bool:
        """Whether the caller is the last one in the job."""
        with self._changed:
            # Who comes out has found nothing left to do, or failed: nobody shall go in any more.
            if self._jobs and self._jobs[0] is job:
                self._jobs.popleft()
            job.inside -= 1
            job.error = job.error or error
            return job.inside == 0


class _Job:
    """One job; all but `work` and `finish` under the crew's lock."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self.work = work
        self.future: Future[WorkSpan] = Future()
        self.future.set_running_or_notify_cancel()
        self.inside = 0  # threads that are in `work` now
        self.began: float | None = None
        self.error: BaseException | None = None
        self._name = name

    def finish(self) -> None:
        """Settle the future, when no thread is inside and none will be."""
        if self.error is not None:
            failure = InternalError(f"{self._name} failed: {self.error}")
            failure.__cause__ = self.error
            self.future.set_exception(failure)
            return
        assert self.began is not None
        self.future.set_result(WorkSpan(self.began, time.perf_counter()))


def cores_beside_gpu(threads: int) -> tuple[int, ...] | None:
    """`optimizer_cores` of this process; None where a system does not say which it may use."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    return optimizer_cores(os.sched_getaffinity(0), threads)


def optimizer_cores(available: Iterable[int], threads: int) -> tuple[int, ...]:
    """The cores for `threads` threads of the optimizer: the first ones of those available.

    The last ones stay free for the thread that issues the GPU's work, where there are more cores
    than threads. A thread of the optimizer on its core would delay every launch by a time slice.
    """
    return tuple(sorted(available)[:threads])
