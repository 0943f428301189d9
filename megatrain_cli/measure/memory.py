"""How fast RAM is read and copied, by threads."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from itertools import cycle

import numpy as np
import torch

from megatrain_cli.measure.stopwatch import Stopwatch
from megatrain_cli.pipeline.copying import CopyPool
from megatrain_cli.pipeline.gateway import CHUNK_BYTES
from megatrain_cli.plan.rates import ThreadRate
from megatrain_cli.store.arena import Arena
from megatrain_cli.units import MIB

# A whole number of pages, so that two threads never share one.
_GRAIN = 4096


def fill(memory: torch.Tensor) -> None:
    """Fill a `uint8` run with bytes that no kernel, disk or link could take a short cut for.

    All pages are touched, on torch's threads.
    """
    block = min(MIB, memory.numel())
    noise = torch.randint(0, 256, (block,), dtype=torch.uint8)
    whole = memory.numel() // block * block
    memory[:whole].view(-1, block).copy_(noise)
    memory[whole:].copy_(noise[: memory.numel() - whole])


@contextmanager
def arrays(num_bytes: int, *, pin: bool) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Two filled runs `(num_bytes,)` of an arena; the second page-locked if asked.

    Raises:
        DeviceError: The driver refused to page-lock it.
    """
    arena = Arena(2 * num_bytes + _GRAIN)
    try:
        source, target = arena.take(num_bytes), arena.take(num_bytes)
        fill(source)
        fill(target)
        if pin:
            arena.register(target, "the memory to measure with", "free some memory")
        yield source, target
    finally:
        arena.close()


def measure_copy(
    num_bytes: int, threads: tuple[int, ...], stopwatch: Stopwatch, budget: float, *, pin: bool
) -> tuple[ThreadRate, ...]:
    """Bytes a second copied from ordinary memory, to page-locked memory or to ordinary one.

    Raises:
        DeviceError: The driver refused to page-lock.
    """
    with arrays(num_bytes, pin=pin) as (source, target):
        # NumPy, as it copies on the calling thread and without the GIL; torch has its own threads.
        old, new = source.numpy(), target.numpy()
        return _by_threads(
            lambda part: np.copyto(new[part], old[part]), num_bytes, threads, stopwatch, budget
        )


@contextmanager
def busy_copies(num_bytes: int, threads: int) -> Iterator[None]:
    """Keep both pools of copying threads at work: one packs weights, one takes gradients in.

    Raises:
        DeviceError: The driver refused to page-lock.
    """
    enough = threading.Event()

    def go_on(pool: CopyPool, source: torch.Tensor, target: torch.Tensor) -> None:
        chunks = zip(source.split(CHUNK_BYTES), target.split(CHUNK_BYTES), strict=True)
        for part, there in cycle(chunks):
            if enough.is_set():
                return
            pool.copy(part, there)

    packers, takers = CopyPool(threads), CopyPool(threads)
    with (
        arrays(num_bytes, pin=True) as (ordinary, locked),
        closing(packers),
        closing(takers),
        ThreadPoolExecutor(2, thread_name_prefix="measure") as pool,
    ):
        half = num_bytes // 2
        packing = pool.submit(go_on, packers, ordinary[:half], locked[:half])
        taking = pool.submit(go_on, takers, locked[half:], ordinary[half:])
        try:
            yield
        finally:
            enough.set()
        packing.result()
        taking.result()  # raise what they failed with


def measure_read(
    num_bytes: int, threads: tuple[int, ...], stopwatch: Stopwatch, budget: float
) -> tuple[ThreadRate, ...]:
    """Bytes a second read from RAM. A sum of integers: NumPy adds faster than RAM delivers."""
    arena = Arena(num_bytes)
    try:
        memory = arena.take(num_bytes)
        fill(memory)
        data = memory.numpy()
        return _by_threads(
            lambda part: data[part].view(np.int64).sum(), num_bytes, threads, stopwatch, budget
        )
    finally:
        arena.close()


def _by_threads(
    work: Callable[[slice], object],
    num_bytes: int,
    threads: tuple[int, ...],
    stopwatch: Stopwatch,
    budget: float,
) -> tuple[ThreadRate, ...]:
    """Rate of `work` over equal parts of `num_bytes`, one a thread, for each number of threads."""
    rates = []
    for count in threads:
        parts = cut(num_bytes, count)
        with ThreadPoolExecutor(count, thread_name_prefix="measure") as pool:
            # `list` raises what a thread raised.
            once = partial(_all_done, pool, work, parts)
            seconds = stopwatch.median(partial(stopwatch.seconds_of, once), budget / len(threads))
        rates.append(ThreadRate(count, parts[-1].stop / seconds))
    return tuple(rates)


def _all_done(
    pool: ThreadPoolExecutor, work: Callable[[slice], object], parts: list[slice]
) -> None:
    list(pool.map(work, parts))


def cut(num_bytes: int, count: int) -> list[slice]:
    """Equal parts in whole pages, one after the other; at most `count` pages are left out."""
    size = max(num_bytes // count // _GRAIN, 1) * _GRAIN
    return [slice(i * size, (i + 1) * size) for i in range(min(count, num_bytes // size))]
