"""The threads of `CudaLanes`: what waits for what, how failures travel, and that nothing hangs.

The device is a fake that is done with an op when it is issued; `tests/gpu` has the real one.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from types import SimpleNamespace

import pytest
import torch

from megatrain_cli.errors import InternalError
from megatrain_cli.pipeline import cuda_lanes
from megatrain_cli.pipeline.breakdown import breakdown
from megatrain_cli.pipeline.cuda_lanes import CudaLanes
from megatrain_cli.pipeline.lanes import Pending
from megatrain_cli.pipeline.ops import Buffer, Event, Kind, Lane, Op
from tests.pipeline import fake_cuda

CPU = torch.device("cpu")
UPDATED = Event("updated", Buffer("weights", 0))
READY = Event("weights_ready", Buffer("slot", 0))
ONE_OF_EACH_LANE = [Kind.STREAM_IN, Kind.FORWARD, Kind.STREAM_OUT, Kind.CLIP, Kind.UPDATE]
PATIENCE = 60  # seconds; a test that is right never waits so long


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_lanes, "cuda", fake_cuda)


@pytest.fixture
def lanes(device: None) -> Iterator[CudaLanes]:
    lanes = CudaLanes(CPU)
    yield lanes
    lanes.close()
    assert not lane_threads()


def lane_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.endswith("-lane")]


def nothing() -> None:
    pass


def fail() -> None:
    raise InternalError("no luck")


class Gate:
    """Work that goes on when the test says so."""

    def __init__(self) -> None:
        self.begun, self.open = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.open.wait(PATIENCE)


def test_each_lane_but_compute_has_a_thread_with_its_name(lanes: CudaLanes) -> None:
    names: dict[Lane, str] = {}
    for kind in ONE_OF_EACH_LANE:
        op = Op(kind, 0)

        def note(op: Op = op) -> None:
            names[op.lane] = threading.current_thread().name

        lanes.submit(op, note)
    lanes.drain()
    here = threading.current_thread().name
    assert names == {lane: here if lane is Lane.COMPUTE else f"{lane}-lane" for lane in Lane}


def test_a_copy_that_waits_for_an_update_does_not_hold_up_compute(lanes: CudaLanes) -> None:
    gate, order = Gate(), list[str]()
    lanes.submit(Op(Kind.UPDATE, 0, records=(UPDATED,)), gate)
    copy = Op(Kind.STREAM_IN, 0, waits=(UPDATED,), records=(READY,))
    lanes.submit(copy, lambda: order.append("copy"))
    lanes.submit(Op(Kind.FORWARD, 1), lambda: order.append("forward 1"))
    assert order == ["forward 1"]
    gate.open.set()
    lanes.submit(Op(Kind.FORWARD, 0, waits=(READY,)), lambda: order.append("forward 0"))
    assert order == ["forward 1", "copy", "forward 0"]


def test_waits_are_for_the_latest_record_when_the_op_was_submitted(lanes: CudaLanes) -> None:
    """A record of a later op, on a thread that runs late, is none of its business."""
    first, second, order = Gate(), Gate(), list[str]()
    lanes.submit(Op(Kind.CLIP, -1), first)
    lanes.submit(Op(Kind.ACCUMULATE, 0, records=(UPDATED,)), nothing)
    lanes.submit(Op(Kind.STREAM_IN, 0, waits=(UPDATED,), records=(READY,)), nothing)
    lanes.submit(Op(Kind.ACCUMULATE, 1, records=(UPDATED,)), second)
    first.open.set()
    lanes.submit(Op(Kind.FORWARD, 0, waits=(READY,)), lambda: order.append("forward"))
    assert order == ["forward"]
    second.open.set()


@pytest.mark.parametrize("kind", ONE_OF_EACH_LANE)
@pytest.mark.parametrize("notice", ["submit", "fence", "drain"])
def test_a_failure_on_any_lane_is_raised_in_the_main_thread(
    kind: Kind, notice: str, lanes: CudaLanes
) -> None:
    """And whoever waits for what has failed goes on, to find that out."""
    waiting = [
        Op(other, 1, waits=(UPDATED,), records=(READY,)) for other in ONE_OF_EACH_LANE
        if other not in (kind, Kind.FORWARD)
    ]  # fmt: skip
    run: list[Op] = []

    def fail_and_notice() -> None:
        lanes.submit(Op(kind, 0, records=(UPDATED,)), fail)
        for op in waiting:
            lanes.submit(op, lambda op=op: run.append(op))  # type: ignore[misc]
        if notice == "submit":
            lanes.submit(Op(Kind.FORWARD, 1, waits=(UPDATED, READY)), nothing)
        elif notice == "fence":
            lanes.fence().wait()
        lanes.drain()

    with pytest.raises(InternalError, match="no luck"):
        fail_and_notice()
    assert run == []


def test_after_a_failure_nothing_more_is_taken(lanes: CudaLanes) -> None:
    lanes.submit(Op(Kind.CLIP, -1), fail)
    for _ in range(2):
        with pytest.raises(InternalError, match="no luck"):
            lanes.drain()
        with pytest.raises(InternalError, match="no luck"):
            lanes.submit(Op(Kind.FORWARD, 0), nothing)


def test_updates_overlap_and_their_records_come_in_order(lanes: CudaLanes) -> None:
    """Neither the next update nor compute waits for one; a copy waits for all up to its own."""
    futures = [Future[None]() for _ in range(3)]
    begun, copied = threading.Semaphore(0), list[int]()

    def begin(layer: int) -> Callable[[], Pending]:
        def work() -> Pending:
            begun.release()
            return futures[layer]

        return work

    for layer in range(3):
        updated = Event("updated", Buffer("weights", layer))
        lanes.submit(Op(Kind.UPDATE, layer, records=(updated,)), begin(layer))
    fence = lanes.fence()
    for _ in futures:
        assert begun.acquire(timeout=PATIENCE)
    for layer in range(3):
        ready = Event("weights_ready", Buffer("slot", layer))
        updated = Event("updated", Buffer("weights", layer))
        copy = Op(Kind.STREAM_IN, layer, waits=(updated,), records=(ready,))
        lanes.submit(copy, lambda layer=layer: copied.append(layer))  # type: ignore[misc]
    futures[1].set_result(None)
    lanes.submit(Op(Kind.FORWARD, 9), nothing)
    assert copied == []
    futures[0].set_result(None)
    lanes.submit(Op(Kind.FORWARD, 1, waits=(Event("weights_ready", Buffer("slot", 1)),)), nothing)
    assert copied == [0, 1]
    futures[2].set_result(None)
    fence.wait()
    lanes.drain()
    assert copied == [0, 1, 2]


def test_an_update_that_ends_early_is_recorded_when_those_before_it_have_ended(
    lanes: CudaLanes,
) -> None:
    first, second = Future[None](), Future[None]()
    second.set_result(None)
    begun = threading.Event()
    for layer, work in enumerate((lambda: first, lambda: second, begun.set)):
        updated = Event("updated", Buffer("weights", layer))
        lanes.submit(Op(Kind.UPDATE, layer, records=(updated,)), work)
    assert begun.wait(PATIENCE)  # so the lane's thread is done with the second
    records = [lanes._latest[Event("updated", Buffer("weights", layer))] for layer in range(2)]
    assert not any(record.reached.is_set() for record in records)
    first.set_result(None)
    assert all(record.reached.is_set() for record in records)


def test_a_fence_is_after_copies_to_the_host(lanes: CudaLanes) -> None:
    gate, order = Gate(), list[str]()

    class OpensWhenWaitedFor(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            gate.open.set()
            return super().wait(timeout)

    def copy() -> None:
        gate()
        order.append("copied")

    lanes.submit(Op(Kind.STREAM_OUT, 0), copy)
    lanes._last[Lane.STREAM_OUT].reached = OpensWhenWaitedFor()
    assert gate.begun.wait(PATIENCE)
    try:
        lanes.fence().wait()
        assert order == ["copied"]
    finally:
        gate.open.set()


def test_streams_and_threads_are_held_for_the_end_of_what_an_op_waits_for(
    lanes: CudaLanes,
) -> None:
    """That it was issued is not enough; a fake device would not show it by itself."""
    lanes.submit(Op(Kind.STREAM_IN, 0, records=(READY,)), nothing)
    lanes.submit(Op(Kind.FORWARD, 0, waits=(READY,)), nothing)
    end: object = lanes._latest[READY]._end
    assert isinstance(end, fake_cuda.Event)
    assert fake(lanes, Lane.COMPUTE).held_for == [end]
    assert end.times_awaited == 0
    lanes.submit(Op(Kind.CLIP, -1, waits=(READY,)), nothing)
    lanes.fence().wait()
    assert end.times_awaited == 1


def test_draining_and_closing_wait_for_every_stream() -> None:
    lanes = CudaLanes(CPU)
    streams = [fake(lanes, lane) for lane in (Lane.STREAM_IN, Lane.COMPUTE, Lane.STREAM_OUT)]
    lanes.drain()
    assert [stream.times_awaited for stream in streams] == [1, 1, 1]
    lanes.close()
    assert [stream.times_awaited for stream in streams] == [2, 2, 2]


def fake(lanes: CudaLanes, lane: Lane) -> fake_cuda.Stream:
    stream: object = lanes._streams[lane]
    assert isinstance(stream, fake_cuda.Stream)
    return stream


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("cancel", [False, True])
def test_an_update_that_fails_later_is_the_lanes_failure(
    when: str, cancel: bool, lanes: CudaLanes
) -> None:
    future: Future[None] = Future()

    def end() -> None:
        if cancel:
            future.cancel()
        else:
            future.set_exception(InternalError("no luck"))

    if when == "before":
        end()
    begun = threading.Event()

    def begin() -> Pending:
        begun.set()
        return future

    lanes.submit(Op(Kind.UPDATE, 0), begin)
    fence = lanes.fence()
    assert begun.wait(PATIENCE)
    if when == "after":
        end()
    with pytest.raises(CancelledError if cancel else InternalError):
        fence.wait()


def test_a_fence_is_after_all_host_work_but_updates(lanes: CudaLanes) -> None:
    gate, order = Gate(), list[str]()
    lanes.submit(Op(Kind.UPDATE, 0), gate)
    lanes.submit(Op(Kind.ACCUMULATE, 0), lambda: order.append("accumulate"))
    lanes.submit(Op(Kind.CLIP, -1), lambda: order.append("clip"))
    lanes.fence().wait()
    assert order == ["accumulate", "clip"]
    gate.open.set()


def test_time_to_issue_is_that_of_the_op_without_its_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0

    def take(seconds: int) -> None:
        nonlocal now
        now += seconds

    clock = SimpleNamespace(perf_counter=lambda: float(now))
    for module in (cuda_lanes, fake_cuda):
        monkeypatch.setattr(module, "time", clock)
    lanes, gate = CudaLanes(CPU), Gate()

    def copy() -> None:
        gate()
        take(5)

    lanes.submit(Op(Kind.STREAM_IN, 0, records=(READY,)), copy)
    assert gate.begun.wait(PATIENCE)
    gate.open.set()
    lanes.submit(Op(Kind.FORWARD, 0, waits=(READY,)), lambda: take(3))
    lanes.submit(Op(Kind.FORWARD, 1), lambda: take(2))
    lanes.drain()
    spans = [span for span in lanes.take_spans() if span.waits_for is None]
    lanes.close()
    assert sorted((s.kind, s.issue_seconds) for s in spans) == [
        (Kind.FORWARD, 2), (Kind.FORWARD, 3), (Kind.STREAM_IN, 5)
    ]  # fmt: skip
    assert breakdown(spans, 0, 60).issue_seconds == 5


def test_close_drops_what_has_not_begun() -> None:
    lanes = CudaLanes(CPU)
    gate, order = Gate(), list[str]()
    lanes.submit(Op(Kind.CLIP, -1), gate)
    lanes.submit(Op(Kind.ACCUMULATE, 0), lambda: order.append("dropped"))
    assert gate.begun.wait(PATIENCE)
    closing = threading.Thread(target=lanes.close)
    closing.start()
    lanes._threads[0].join(PATIENCE)  # an idle one: it ends because `close` was called
    gate.open.set()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    assert order == []
    assert not lane_threads()
    with pytest.raises(InternalError, match="closed"):
        lanes.submit(Op(Kind.FORWARD, 0), nothing)


def test_close_waits_for_an_update_that_has_begun() -> None:
    lanes, future, begun = CudaLanes(CPU), Future[None](), threading.Event()

    class EndsWhenWaitedFor(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            future.set_result(None)
            return super().wait(timeout)

    def begin() -> Pending:
        begun.set()
        return future

    lanes.submit(Op(Kind.UPDATE, 0), begin)
    lanes._last[Lane.UPDATE].reached = EndsWhenWaitedFor()
    assert begun.wait(PATIENCE)
    lanes.close()
    assert future.done()
