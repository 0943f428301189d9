"""Jobs of a crew are worked on in order, by all threads, with no wait between them; none is lost.

Order is forced by events, so a law that does not hold shows as a wrong list or as a wait that ends
in `TimeoutError`.
"""

import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.errors import InternalError
from megatrain_cli.optim.crew import Crew, WorkSpan, optimizer_cores

PATIENCE = 60  # seconds, for what takes none


def first_comes(first: Callable[[], None], later: Callable[[], None]) -> Callable[[], None]:
    """Work that is one thing for the first thread to call it, and another for all others."""
    tickets = iter((first,))

    def work() -> None:
        next(tickets, later)()

    return work


def wait_for(event: threading.Event) -> None:
    assert event.wait(PATIENCE)


def nothing() -> None:
    """Done."""


def result(future: Future[WorkSpan]) -> WorkSpan:
    return future.result(PATIENCE)


def test_one_thread_does_one_job_after_the_other_in_the_order_of_submission() -> None:
    worked, settled = list[int](), list[int]()
    gate = threading.Event()
    with Crew(1) as crew:
        crew.submit("gate", lambda: wait_for(gate))
        futures = [crew.submit(f"job {i}", partial(worked.append, i)) for i in range(20)]
        for future in futures:
            future.add_done_callback(lambda done: settled.append(futures.index(done)))
        gate.set()
        spans = [result(future) for future in futures]
    assert worked == settled == list(range(20))
    times = [time for span in spans for time in (span.began, span.ended)]
    assert times == sorted(times)
    assert all(span.seconds == span.ended - span.began for span in spans)


def test_a_thread_with_nothing_left_to_do_starts_the_next_job() -> None:
    tail, first_was_done = threading.Event(), list[bool]()
    with Crew(2) as crew:
        first = crew.submit("first", first_comes(lambda: wait_for(tail), nothing))
        second = crew.submit("second", lambda: first_was_done.append(first.done()))
        second.add_done_callback(lambda _: tail.set())
        late, early = result(first), result(second)
    assert first_was_done[0] is False  # and so were it if the second waited for the first: never
    assert late.began <= early.began <= early.ended <= late.ended


def test_every_thread_works_on_a_job_that_has_work_for_all() -> None:
    together = threading.Barrier(5)
    names: set[str] = set()

    def work() -> None:
        together.wait(PATIENCE)
        names.add(threading.current_thread().name)

    with Crew(5) as crew:
        result(crew.submit("job", work))
    assert names == {f"adam-{i}" for i in range(5)}


def test_a_failure_is_raised_with_its_name_and_the_others_go_on() -> None:
    def fail() -> None:
        raise ZeroDivisionError("no luck")

    with Crew(3) as crew:
        futures = [crew.submit(f"Job {i}", fail if i % 2 else nothing) for i in range(10)]
        for i, future in enumerate(futures):
            if i % 2:
                with pytest.raises(InternalError, match=f"Job {i} failed: no luck") as error:
                    result(future)
                assert isinstance(error.value.__cause__, ZeroDivisionError)
            else:
                result(future)


def test_a_job_fails_when_the_last_thread_has_left_it_and_nobody_joins_it_any_more() -> None:
    tail, first_was_done, calls = threading.Event(), list[bool](), list[str]()

    def stay() -> None:
        calls.append("stay")
        wait_for(tail)

    def fail() -> None:
        calls.append("fail")
        raise ZeroDivisionError

    with Crew(2) as crew:
        first = crew.submit("first", first_comes(stay, fail))
        second = crew.submit("second", lambda: first_was_done.append(first.done()))
        second.add_done_callback(lambda _: tail.set())
        with pytest.raises(InternalError, match="first failed"):
            result(first)
    assert calls == ["stay", "fail"]
    assert first_was_done[0] is False


def test_closing_finishes_what_was_submitted_and_ends_the_threads() -> None:
    before = threading.active_count()
    gate = threading.Event()
    crew = Crew(2)
    futures = [crew.submit("gate", lambda: wait_for(gate))]
    futures += [crew.submit("job", nothing) for _ in range(10)]
    closing = threading.Thread(target=crew.close)
    closing.start()
    gate.set()
    closing.join()
    crew.close()
    assert all(future.done() for future in futures)
    assert threading.active_count() == before
    with pytest.raises(InternalError, match="late was asked of a crew that is closed"):
        crew.submit("late", nothing)


def test_a_job_cannot_be_cancelled() -> None:
    gate = threading.Event()
    with Crew(1) as crew:
        crew.submit("gate", lambda: wait_for(gate))
        future = crew.submit("job", nothing)
        assert not future.cancel()
        gate.set()
        result(future)


def test_a_job_that_is_done_is_let_go_of() -> None:
    class Memory:
        def work(self) -> None:
            pass

    memory = Memory()
    held = weakref.ref(memory)
    seen: list[Memory | None] = []
    with Crew(1) as crew:
        crew.submit("job", memory.work)
        del memory
        result(crew.submit("next", lambda: seen.append(held())))
    assert seen == [None]


def affinities(crew: Crew, threads: int) -> list[set[int]]:
    found: list[set[int]] = []
    together = threading.Barrier(threads)

    def look() -> None:
        together.wait(PATIENCE)
        found.append(os.sched_getaffinity(0))

    result(crew.submit("look", look))
    return found


def test_threads_are_bound_to_the_cores_and_their_maker_is_not() -> None:
    ours = os.sched_getaffinity(0)
    for cores in [(min(ours),), tuple(ours)]:
        with Crew(3, cores) as crew:
            assert affinities(crew, 3) == [set(cores)] * 3
        assert os.sched_getaffinity(0) == ours
    with Crew(2) as crew:
        assert affinities(crew, 2) == [ours] * 2


def test_cores_that_are_not_ours_are_refused_before_any_thread_starts() -> None:
    before = threading.active_count()
    for cores in [(), (1 << 20,)]:
        with pytest.raises(InternalError, match="are not among"):
            Crew(2, cores)
    with pytest.raises(InternalError, match="0 threads"):
        Crew(0)
    assert threading.active_count() == before


def test_where_threads_cannot_be_bound_they_work_unbound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity")
    with Crew(2, (0,)) as crew:
        assert affinities(crew, 2) == [os.sched_getaffinity(0)] * 2


@given(st.sets(st.integers(0, 300), min_size=1), st.integers(1, 64))
def test_the_last_cores_stay_free_where_there_are_more_than_threads(
    available: set[int], threads: int
) -> None:
    cores = optimizer_cores(available, threads)
    assert len(cores) == min(threads, len(available))
    assert set(cores) <= available
    assert all(core < free for core in cores for free in available - set(cores))
