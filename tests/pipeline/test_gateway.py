"""What comes out of the gateway is what went in, on any link that is as late as its waits allow.

The link is the test's: copies are carried out when somebody waits for them, or at the very end. So
a chunk that is packed again too early arrives wrong, every time.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.errors import DeviceError
from megatrain_cli.pipeline.copying import CopyPool, Wait
from megatrain_cli.pipeline.gateway import (
    CHUNK_BYTES,
    Gateway,
    Link,
    chunk_bytes_for,
    cuda_link,
)
from megatrain_cli.plan.rates import LinkRate
from megatrain_cli.plan.tiles import PAGE_BYTES
from megatrain_cli.units import MIB
from tests.plan.small import RATES
from tests.store.cudart import fake_driver


class LateLink:
    """A stream that moves only when it must, in order."""

    def __init__(self) -> None:
        self._queue: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
        self.sent = self.arrived = 0

    def __call__(self, source: torch.Tensor, target: torch.Tensor) -> Wait:
        self._queue.append((source, target))
        self.sent += 1
        number = self.sent
        return lambda: self.run_until(number)

    def run_until(self, number: int) -> None:
        while self.arrived < number:
            source, target = self._queue.popleft()
            target.copy_(source)
            self.arrived += 1


class ForgottenLink(LateLink):
    """Nobody waits for it before a chunk is packed again."""

    def __call__(self, source: torch.Tensor, target: torch.Tensor) -> Wait:
        super().__call__(source, target)
        return lambda: None


class LatePool(CopyPool):
    """Packs when somebody waits for it."""

    def start(self, source: torch.Tensor, target: torch.Tensor) -> Wait:
        def pack() -> None:
            super(LatePool, self).start(source, target)()

        return pack


class ForgottenPool(LatePool):
    """Packs when all is over, since nobody waits for it."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self._started: list[Wait] = []

    def start(self, source: torch.Tensor, target: torch.Tensor) -> Wait:
        self._started.append(super().start(source, target))
        return lambda: None

    def close(self) -> None:
        while self._started:
            self._started.pop(0)()
        super().close()


@pytest.fixture(scope="module")
def driver() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        fake_driver(patch)
        yield


def runs_of(sizes: Sequence[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(len(sizes))
    return [torch.randn(n, generator=generator).bfloat16() for n in sizes]


def passes(
    sizes: Sequence[int],
    chunk_bytes: int,
    make_pool: Callable[[int], CopyPool] = CopyPool,
    link: LateLink | None = None,
) -> bool:
    """Whether runs of these sizes, one after the other, come out as they went in."""
    link = link or LateLink()
    pool = make_pool(2)
    gateway = Gateway(2 * max(sizes), pool, link, chunk_bytes)
    wanted = runs_of(sizes)
    targets = [torch.zeros(n, dtype=torch.bfloat16) for n in sizes]
    for run, target in zip(wanted, targets, strict=True):
        source = run.clone()
        gateway.copy(source, target)
        source.fill_(torch.nan)  # may change as soon as `copy` has returned
    pool.close()
    link.run_until(link.sent)
    gateway.close()
    return all(map(torch.equal, wanted, targets))


@pytest.mark.usefixtures("driver")
@given(
    st.lists(st.integers(1, 5 * PAGE_BYTES), min_size=1, max_size=8),
    st.integers(1, 4 * PAGE_BYTES),
    st.sampled_from([CopyPool, LatePool]),
)
def test_any_runs_in_any_chunks_arrive_bit_for_bit(
    sizes: list[int], chunk_bytes: int, make_pool: Callable[[int], CopyPool]
) -> None:
    assert passes(sizes, chunk_bytes, make_pool)


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("pool", [CopyPool, LatePool])
def test_without_the_wait_for_the_link_chunks_are_overwritten(
    pool: Callable[[int], CopyPool],
) -> None:
    sizes = [3 * PAGE_BYTES] * 3
    assert passes(sizes, PAGE_BYTES, pool)
    assert not passes(sizes, PAGE_BYTES, pool, ForgottenLink())


@pytest.mark.usefixtures("driver")
def test_without_the_wait_for_packing_other_bytes_are_sent() -> None:
    sizes = [3 * PAGE_BYTES] * 3
    assert passes(sizes, PAGE_BYTES, LatePool)
    assert not passes(sizes, PAGE_BYTES, ForgottenPool)


@pytest.mark.usefixtures("driver")
def test_the_next_chunk_is_being_packed_when_one_is_sent() -> None:
    log: list[str] = []

    class LoggedPool(LatePool):
        def start(self, source: torch.Tensor, target: torch.Tensor) -> Wait:
            log.append("pack")
            return super().start(source, target)

    class LoggedLink(LateLink):
        def __call__(self, source: torch.Tensor, target: torch.Tensor) -> Wait:
            log.append("send")
            return super().__call__(source, target)

    assert passes([2 * PAGE_BYTES], PAGE_BYTES, LoggedPool, LoggedLink())  # BF16: four chunks
    assert log == ["pack", "pack", "send", "pack", "send", "pack", "send", "send"]


@pytest.mark.usefixtures("driver")
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=12),
    st.integers(1, 3),
)
def test_packing_waits_for_the_chunks_it_needs_and_for_no_other(
    pages: list[int], chunk_pages: int
) -> None:
    """Two whole runs of the largest size are packed while nothing has left yet."""
    link = LateLink()
    pool = CopyPool(1)
    largest = max(pages)
    gateway = Gateway(largest * PAGE_BYTES, pool, link, chunk_pages * PAGE_BYTES)
    chunk = min(chunk_pages, largest)
    room = gateway.num_bytes // (chunk * PAGE_BYTES)
    assert 2 * largest - chunk < room * chunk <= 2 * largest
    for count in pages:
        run = torch.zeros(count * PAGE_BYTES, dtype=torch.uint8)
        gateway.copy(run, run.clone())
        assert link.arrived == max(0, link.sent - room)
    pool.close()
    gateway.close()


def test_a_ring_that_cannot_be_locked_is_said_with_its_bytes_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cudart = fake_driver(monkeypatch, refuse=1)
    pool = CopyPool(1)
    message = r"^pinned staging of 8\.00 KiB: .*refused.*`ulimit -l`.*`pipeline\.device: cpu`\.$"
    with pytest.raises(DeviceError, match=message):
        Gateway(PAGE_BYTES, pool, LateLink())
    assert cudart.locked == {}
    assert cudart.last_error == 0
    gateway = Gateway(PAGE_BYTES, pool, LateLink())
    assert list(cudart.locked.values()) == [gateway.num_bytes]
    gateway.close()
    assert cudart.locked == {}


@given(st.lists(st.floats(1e6, 1e12), min_size=1, max_size=12), st.floats(0.01, 1.0))
def test_chunks_are_no_smaller_than_packing_or_the_link_needs(
    to_device: list[float], target: float
) -> None:
    link = tuple(LinkRate(MIB // 4 << i, rate, 1.0, 1.0) for i, rate in enumerate(to_device))
    found = chunk_bytes_for(replace(RATES, link=link), target)
    assert found >= CHUNK_BYTES == chunk_bytes_for(None, target)
    # Where the link has reached its target by then, no more is asked for.
    slow = [point.num_bytes for point in link if point.to_device < target * max(to_device)]
    if not slow or slow[-1] < CHUNK_BYTES:
        assert found == CHUNK_BYTES
    else:
        assert found == min(2 * slow[-1], link[-1].num_bytes)


def test_a_link_that_was_not_measured_asks_for_nothing() -> None:
    assert chunk_bytes_for(replace(RATES, link=None), 0.8) == CHUNK_BYTES


def forgotten_link(source: torch.Tensor, target: torch.Tensor) -> Wait:
    slow_link(source, target)
    return lambda: None


def slow_link(source: torch.Tensor, target: torch.Tensor) -> Wait:
    torch.cuda._sleep(2_000_000)
    return cuda_link(source, target)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("link", "whole"), [(cuda_link, True), (slow_link, True), (forgotten_link, False)]
)
def test_a_real_link_delivers_unless_nobody_waits_for_it(link: Link, whole: bool) -> None:
    pool = CopyPool(4)
    sizes = [3_000_001, 5_000_000, 17, 5_000_000, 4_999_999, 1_234_567, 5_000_000]
    gateway = Gateway(2 * max(sizes), pool, link, 1 << 20)
    wanted = runs_of(sizes)
    targets = [torch.zeros(n, dtype=torch.bfloat16, device="cuda") for n in sizes]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for run, target in zip(wanted, targets, strict=True):
            source = run.clone()
            gateway.copy(source, target)
            source.fill_(torch.nan)
    stream.synchronize()
    arrived = [torch.equal(run, target.cpu()) for run, target in zip(wanted, targets, strict=True)]
    assert all(arrived) is whole
    pool.close()
    gateway.close()
