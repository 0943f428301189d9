"""Memory, optimizer and layer: each part does the work that it claims to time."""

import ctypes
import resource
import threading
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.measure.adam import busy_optimizer, measure_adam
from megatrain_cli.measure.amounts import FULL, thread_counts
from megatrain_cli.measure.compute import Layer, compile_layer, measure_issue
from megatrain_cli.measure.filled import filled_store
from megatrain_cli.measure.gradients import measure_fresh, measure_logits, measure_sums
from megatrain_cli.measure.memory import busy_copies, cut, fill, measure_copy, measure_read
from megatrain_cli.measure.stopwatch import Stopwatch
from megatrain_cli.model.layout import LayerLayout
from megatrain_cli.optim import worker
from megatrain_cli.optim.crew import WorkSpan
from megatrain_cli.optim.kernels import I64
from megatrain_cli.optim.worker import TileUpdater, chunk_table
from megatrain_cli.pipeline.copying import CopyPool
from megatrain_cli.pipeline.gradients import GradientCollector
from megatrain_cli.store.arena import Arena
from megatrain_cli.store.heap import touched_heap


@given(st.integers(4096, 10**7), st.integers(1, 70))
def test_parts_are_equal_whole_pages_without_gap_or_overlap(num_bytes: int, count: int) -> None:
    parts = cut(num_bytes, count)
    assert 1 <= len(parts) <= count
    assert parts[0].start == 0
    assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
    assert {(part.stop - part.start) % 4096 for part in parts} == {0}
    assert len({part.stop - part.start for part in parts}) == 1
    assert num_bytes - count * 4096 < parts[-1].stop <= num_bytes


@given(st.integers(1, 3 << 20))
def test_filled_memory_is_noise_to_its_last_byte(num_bytes: int) -> None:
    memory = torch.zeros(num_bytes + 1, dtype=torch.uint8)
    fill(memory[:num_bytes])
    assert memory[num_bytes] == 0
    counts = np.bincount(memory[:num_bytes].numpy(), minlength=256)
    assert counts.max() <= num_bytes / 64 + 20


@given(st.integers(1, 300))
def test_threads_grow_from_one_to_all_cores(cores: int) -> None:
    counts = thread_counts(cores)
    assert (counts[0], counts[-1]) == (1, cores)
    assert list(counts) == sorted(set(counts))
    assert all(b <= 2 * a for a, b in pairwise(counts))


@given(st.integers(0, 1 << 42))
def test_amounts_fit_the_memory_that_is_free(free: int) -> None:
    amounts = FULL.within(free)
    most = max(free // 16, 1 << 20)
    assert amounts.copy_bytes <= most
    assert amounts.adam_numel * 14 <= most
    assert amounts.link_bytes == FULL.link_bytes[: len(amounts.link_bytes)]
    assert max(amounts.link_bytes) <= most


def test_each_number_of_threads_has_a_rate() -> None:
    watch = Stopwatch(30.0)
    with filled_store(1 << 16) as store:
        adam = measure_adam(store, (1, 3), watch, 0.1)
    for rates in (
        measure_copy(1 << 20, (1, 3), watch, 0.1, pin=False),
        measure_read(1 << 20, (1, 3), watch, 0.1),
        adam,
    ):
        assert [rate.threads for rate in rates] == [1, 3]
        assert all(rate.rate > 0 for rate in rates)


def test_a_copy_copies_every_page(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    copyto = np.copyto

    def counted(target: np.ndarray, source: np.ndarray) -> None:
        copyto(target, source)
        seen.append(target.nbytes)

    monkeypatch.setattr(np, "copyto", counted)
    measure_copy(1 << 20, (4,), Stopwatch(30.0), 0.0, pin=False)
    assert sum(seen) == 2 << 20  # with the warm-up


def test_an_optimizer_stays_at_work_until_it_is_left_and_leaves_no_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    submit = TileUpdater.submit
    rounds = threading.Semaphore(0)

    def counted(self: TileUpdater, *args: Any) -> Future[WorkSpan]:
        rounds.release()
        return submit(self, *args)

    made: list[LayerLayout] = []

    def noted(layout: LayerLayout, *args: Any) -> I64:
        made.append(layout)
        return chunk_table(layout, *args)

    monkeypatch.setattr(TileUpdater, "submit", counted)
    monkeypatch.setattr(worker, "chunk_table", noted)
    before = threading.active_count()
    with filled_store(1 << 14) as store, busy_optimizer(store, 2, None):
        assert len(made) == 16  # one for each tile, before anything is measured
        for _ in range(100):  # of 16 tiles: each comes again and again
            assert rounds.acquire(timeout=60)
    assert len(made) == 16
    assert threading.active_count() == before
    with (
        pytest.raises(RuntimeError, match="as told"),
        filled_store(1 << 14) as store,
        busy_optimizer(store, 2, None),
    ):
        raise RuntimeError("as told")
    assert threading.active_count() == before


def test_both_pools_copy_until_told_to_stop_and_a_failure_is_not_hidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Arena, "register", lambda *args: None)  # as only a GPU's driver page-locks
    copy = CopyPool.copy
    copies: dict[CopyPool, threading.Semaphore] = {}
    begun = threading.Semaphore(0)

    def counted(self: CopyPool, source: torch.Tensor, target: torch.Tensor) -> None:
        if self not in copies:
            copies[self] = threading.Semaphore(0)
            begun.release()
        copies[self].release()
        copy(self, source, target)

    monkeypatch.setattr(CopyPool, "copy", counted)
    before = threading.active_count()
    with busy_copies(1 << 16, 2):
        for _ in range(2):
            assert begun.acquire(timeout=60)
        for pool in list(copies.values()):
            for _ in range(100):  # of one chunk: it comes again and again
                assert pool.acquire(timeout=60)
    assert threading.active_count() == before

    fails = threading.Event()

    def failing(self: CopyPool, source: torch.Tensor, target: torch.Tensor) -> None:
        fails.set()
        raise RuntimeError("as told")

    monkeypatch.setattr(CopyPool, "copy", failing)
    with pytest.raises(RuntimeError, match="as told"), busy_copies(1 << 16, 2):
        assert fails.wait(60)  # they may not have begun when the block ends
    assert threading.active_count() == before


def test_the_optimizer_updates_every_parameter_and_finds_no_odd_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    submit = TileUpdater.submit
    changed: dict[int, list[float]] = {}

    def watched(self: TileUpdater, tile, gradient, start, step):  # type: ignore[no-untyped-def] # as the method
        name = next(iter(tile.layout.by_name))
        before = tile.read_master(name)
        done = submit(self, tile, gradient, start, step)
        done.result()
        after = tile.read_master(name)
        assert torch.isfinite(after).all()
        assert torch.isfinite(tile.exp_avg_sq).all()
        changed.setdefault(tile.index, []).append((before != after).float().mean().item())
        return done

    monkeypatch.setattr(TileUpdater, "submit", watched)
    with filled_store(1 << 16) as store:
        measure_adam(store, (2,), Stopwatch(30.0), 0.0)
    counts = {len(shares) for shares in changed.values()}
    assert len(changed) > 1
    assert counts == {min(counts)}  # each tile as often as any other
    assert all(share == pytest.approx(1.0, abs=0.02) for x in changed.values() for share in x)


def test_issuing_is_what_calls_take_on_average_without_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]

    class Scripted:
        """Each fourth forward takes 13 times as long, and all of the first calls."""

        calls = 0

        def forward(self, call: object) -> torch.Tensor:
            now[0] += 100 if self.calls < 5 else 13 if self.calls % 4 == 0 else 1
            self.calls += 1
            return torch.zeros(())

        def backward(self, out: torch.Tensor) -> None:
            now[0] += 2

    class Idle:
        def synchronize(self) -> None:
            now[0] += 1000  # waited for, and not issued

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Idle())
    watch, device = Stopwatch(1e9, lambda: now[0]), torch.device("cuda")
    layer: Any = Scripted()
    cost = measure_issue(device, layer, lambda: None, watch, 0.0)
    assert (layer.calls, cost.backward) == (10, 2)
    assert cost.forward == pytest.approx((4 * 1 + 13) / 5)
    longer = measure_issue(device, layer, lambda: None, watch, 4e5)
    assert longer.forward == pytest.approx((3 * 1 + 13) / 4, rel=0.02)


def test_a_layer_computes_gradients_of_all_its_weights() -> None:
    layer = Layer(torch.device("cpu"), 128, (2, 16), torch.float32)
    seen: dict[str, float] = {}
    for name, param in layer.module.named_parameters():
        param.register_hook(lambda grad, name=name: seen.update({name: grad.norm().item()}))
    layer.run(layer.module)
    params = dict(layer.module.named_parameters())
    # A bias of keys shifts all scores of a query alike, so its gradient may be 0.
    assert {name for name, norm in seen.items() if norm > 0} | {"self_attn.k_proj.bias"} == set(
        params
    )
    assert all(param.grad is None for param in params.values())
    assert layer.flops == 6 * 32 * sum(param.numel() for param in params.values())


def test_gradients_logits_and_new_memory_have_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Stopwatch(30.0)
    seen: list[bool] = []
    add = GradientCollector.add

    def watched(
        self: GradientCollector, layer: int, gradients: list[torch.Tensor], *, first: bool
    ) -> None:
        seen.append(first)
        add(self, layer, gradients, first=first)

    monkeypatch.setattr(GradientCollector, "add", watched)
    for dtype in (torch.float32, torch.bfloat16):
        sums = measure_sums(1 << 16, dtype, watch, 0.0)
        assert min(sums.first, sums.more, sums.finish) > 0
        assert measure_logits(300, dtype, watch, 0.0) > 0
    assert seen == [True, True, False, False] * 2  # each with its warm-up
    assert measure_fresh(1 << 20, watch, 0.0) > 0


def test_new_memory_is_new_each_time() -> None:
    """Or the rate would be that of memory at hand."""
    size = 64 << 20
    pages = size // resource.getpagesize()
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if huge.exists() and huge.read_text().startswith("[always]"):
        pages //= 512
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    measure_fresh(size, Stopwatch(30.0), 0.0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before >= 2 * pages


def test_a_layer_in_a_touched_heap_needs_no_new_memory() -> None:
    """glibc only; elsewhere the probe's layers take what memory takes too."""
    if not hasattr(ctypes.CDLL(None), "mallopt"):
        pytest.skip("not glibc")
    layer = Layer(torch.device("cpu"), 512, (1, 16), torch.float32)
    mapped = 3 * 4 * 512 * 2048 // resource.getpagesize()  # gradients of its MLP

    def faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        layer.run(layer.module)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    with touched_heap():
        faults()
        assert min(faults() for _ in range(5)) < mapped / 20


def test_a_compile_that_fails_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(module: torch.nn.Module, *, dynamic: bool) -> torch.nn.Module:
        raise RuntimeError("no compiler here\nmany details")

    monkeypatch.setattr(torch, "compile", refuse)
    layer = Layer(torch.device("cpu"), 128, (1, 4))
    assert compile_layer(layer) == "RuntimeError: no compiler here"
