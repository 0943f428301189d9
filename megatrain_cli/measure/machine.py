"""Measure this machine part by part, within a minute."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from megatrain_cli.errors import DeviceError, PlanError, StorageError
from megatrain_cli.measure.adam import busy_optimizer, measure_adam
from megatrain_cli.measure.amounts import TOTAL_SECONDS, Amounts, thread_counts
from megatrain_cli.measure.compute import (
    Layer,
    LayerCall,
    compile_layer,
    measure_cpu_layer,
    measure_issue,
    measure_layer,
    measure_matmul,
    measure_new_products,
)
from megatrain_cli.measure.disk import measure_disk
from megatrain_cli.measure.filled import filled_store
from megatrain_cli.measure.gradients import measure_fresh, measure_logits, measure_sums
from megatrain_cli.measure.link import measure_link
from megatrain_cli.measure.lockable import SHARE_OF_HOST, Lockable, Locker, find_lockable
from megatrain_cli.measure.memory import busy_copies, measure_copy, measure_read
from megatrain_cli.measure.stopwatch import Stopwatch
from megatrain_cli.model.backward import wake_backward
from megatrain_cli.optim.crew import cores_beside_gpu
from megatrain_cli.plan.decide import copy_threads, optimizer_threads
from megatrain_cli.plan.machine import MachineSpec
from megatrain_cli.plan.machine_file import VERSION, MachineFile
from megatrain_cli.plan.rates import (
    LONG_ROW,
    NARROW_WIDTH,
    SHORT_ROW,
    WIDE_WIDTH,
    Beside,
    ComputeRates,
    CpuLayer,
    CpuRates,
    IssueCost,
    IssueTimes,
    MachineRates,
    ThreadRate,
)
from megatrain_cli.probe.facts import fingerprint, machine_facts
from megatrain_cli.probe.machine import pci_address, probe_machine
from megatrain_cli.store.heap import touched_heap
from megatrain_cli.store.master import MasterStore

T = TypeVar("T")

# Seconds of each part after its warm-up. Together much less than the total, which leaves room to
# warm up and to compile.
_COPY, _READ, _ADAM, _DISK, _LINK, _LOCK, _MATMUL, _LAYER = 2.0, 1.2, 2.0, 3.0, 1.5, 1.2, 0.4, 0.4
_SUMS, _LOGITS, _FRESH, _ISSUE, _ISSUE_BESIDE, _COPY_BESIDE = 0.6, 0.2, 0.2, 0.3, 1.2, 0.5

# A cold compile of the layer is not begun with less time left; it cannot be interrupted.
_COMPILE_NEEDS = 12.0


def measure_machine(
    device: str,
    disk: Path,
    amounts: Amounts,
    say: Callable[[str], None],
    stopwatch: Stopwatch | None = None,
) -> MachineFile:
    """Measure all that this machine has; what it lacks is None, never guessed.

    Args:
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        disk: A folder on the disk to measure.
        amounts: How much to move and compute.
        say: Told what is going on, a line a part, and each note.
        stopwatch: The time for all; a fresh one without it.

    Raises:
        DeviceError: A GPU was asked for that is not there.
    """
    machine = probe_machine(device, key="--device")
    work = _Work(
        machine,
        amounts.within(machine.host_bytes),
        disk,
        say,
        stopwatch or Stopwatch(TOTAL_SECONDS),
    )
    # What page-locks does so for the current device.
    with torch.cuda.device(machine.device) if machine.has_cuda else nullcontext():
        rates = work.rates()
    return MachineFile(
        version=VERSION,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        fingerprint=fingerprint(machine),
        # Without the cgroup's path: it may name a user or a job.
        machine=replace(
            machine,
            rates=rates,
            host_source=machine.host_source.partition(" /")[0],
            program_bytes=0,  # of this process, and no run's
        ),
        facts=machine_facts(pci_address(machine)),
        notes=tuple(work.notes),
    )


@dataclass
class _Work:
    machine: MachineSpec
    amounts: Amounts
    disk: Path
    say: Callable[[str], None]
    stopwatch: Stopwatch
    notes: list[str] = field(default_factory=list)

    def rates(self) -> MachineRates:
        """All parts in order; the compile last, as nothing can hurry it."""
        watch, amounts = self.stopwatch, self.amounts
        threads = thread_counts(self.machine.num_cores)
        on_gpu = self.machine.has_cuda
        device = torch.device(self.machine.device)
        self.say("copies from memory to memory")
        copy = measure_copy(amounts.copy_bytes, threads, watch, _COPY, pin=False)
        self.say("reads of memory")
        read = measure_read(amounts.copy_bytes, threads, watch, _READ)
        with filled_store(amounts.adam_numel) as store:
            self.say("the optimizer")
            adam = self._adam(store, threads)
            disk = self._try(
                "the disk",
                lambda: measure_disk(self.disk, amounts.disk_bytes, store, watch, _DISK),
            )
        cpu = None if on_gpu else self._cpu()
        if disk is not None and not disk.direct:
            self._note("the disk: O_DIRECT was refused, so files went through the page cache")
        link = pinned = lockable = compute = beside = None
        if on_gpu:
            link = self._try(
                "the link", lambda: measure_link(device, amounts.link_bytes, watch, _LINK)
            )
            pinned = self._try(
                "copies from memory to page-locked memory",
                lambda: measure_copy(amounts.copy_bytes, threads, watch, _COPY, pin=True),
            )
            lockable = self._lockable()
            gpu = self._try("the GPU", lambda: self._compute(device))
            if gpu is not None:
                compute, issue = gpu
                beside = self._try("issuing beside other threads", lambda: self._beside(issue))
        return MachineRates(
            link=link,
            copy=copy,
            copy_to_pinned=pinned,
            read=read,
            adam=adam,
            lockable_bytes=None if lockable is None else lockable.num_bytes,
            lockable_refused=lockable is not None and lockable.refused,
            compute=compute,
            disk=disk,
            cpu=cpu,
            beside=beside,
        )

    def _adam(self, store: MasterStore, threads: tuple[int, ...]) -> tuple[ThreadRate, ...]:
        """By threads; beside a GPU also with those that `auto` is, and on the cores of a run's."""
        if not self.machine.has_cuda:
            return measure_adam(store, threads, self.stopwatch, _ADAM)
        counts = sorted({*threads, optimizer_threads(self.machine, copies=False)})
        return measure_adam(store, counts, self.stopwatch, _ADAM, cores_beside_gpu)

    def _cpu(self) -> CpuRates:
        self.say("a layer on the cores")
        watch, amounts = self.stopwatch, self.amounts

        def rate(width: int, tokens: int, dtype: torch.dtype) -> float:
            rows = (1, min(tokens, amounts.layer_tokens[1]))
            width = min(width, amounts.layer_width)
            layer = Layer(torch.device("cpu"), width, rows, dtype)
            return measure_cpu_layer(layer, watch, _LAYER)

        def rates(dtype: torch.dtype) -> CpuLayer:
            width = min(NARROW_WIDTH, amounts.layer_width)
            return CpuLayer(
                narrow_short=rate(NARROW_WIDTH, SHORT_ROW, dtype),
                narrow_long=rate(NARROW_WIDTH, LONG_ROW, dtype),
                wide_short=rate(WIDE_WIDTH, SHORT_ROW, dtype),
                wide_long=rate(WIDE_WIDTH, LONG_ROW, dtype),
                new_product=measure_new_products(width, SHORT_ROW, dtype, watch),
                logits=measure_logits(16 * amounts.layer_width, dtype, watch, _LOGITS),
                sums=measure_sums(amounts.adam_numel // 4, dtype, watch, _SUMS),
            )

        with touched_heap():
            float32, bfloat16 = rates(torch.float32), rates(torch.bfloat16)
        fresh = measure_fresh(amounts.copy_bytes // 8, watch, _FRESH)
        return CpuRates(float32=float32, bfloat16=bfloat16, fresh=fresh)

    def _lockable(self) -> Lockable:
        self.say("page-locking")
        limit = int(self.machine.host_bytes * SHARE_OF_HOST)
        end = self.stopwatch.clock() + _LOCK
        with Locker() as locker:
            return find_lockable(
                locker.lock,
                limit,
                self.amounts.lock_step_bytes,
                lambda: self.stopwatch.clock() < end,
            )

    def _compute(self, device: torch.device) -> tuple[ComputeRates, Callable[[float], IssueCost]]:
        """Rates, and what measures issuing once more: of the compiled layer, where there is one.

        It is given seconds.
        """
        watch, amounts = self.stopwatch, self.amounts
        matmul = measure_matmul(device, amounts.matmul_size, watch, _MATMUL)
        wake_backward(device)
        layer = Layer(device, amounts.layer_width, amounts.layer_tokens)
        eager = measure_layer(device, layer, layer.module, watch, _LAYER)
        issue = partial(measure_issue, device, layer, layer.module, watch)
        rates = ComputeRates(matmul, eager, None, issue(_ISSUE))
        call: LayerCall | str
        if watch.remaining < _COMPILE_NEEDS:
            call = f"{watch.remaining:.0f} s were left, too little to begin"
        else:
            self.say("compiling a layer")
            call = compile_layer(layer)
        if isinstance(call, str):
            self._note(f"torch.compile of a layer was not measured: {call}")
            return rates, issue
        compiled = measure_layer(device, layer, call, watch, _LAYER)
        issue = partial(measure_issue, device, layer, call, watch)
        return replace(rates, compiled_layer=compiled, compiled_issue=issue(_ISSUE)), issue

    def _beside(self, issue: Callable[[float], IssueCost]) -> Beside:
        machine, packers = self.machine, copy_threads(self.machine)
        num_bytes, watch = self.amounts.copy_bytes, self.stopwatch
        alone = issue(_ISSUE)
        with filled_store(self.amounts.adam_numel) as store:
            threads = optimizer_threads(machine, copies=False)
            with busy_optimizer(store, threads, cores_beside_gpu(threads)):
                optimizer = issue(_ISSUE_BESIDE)
            threads = optimizer_threads(machine, copies=True)
            with busy_optimizer(store, threads, cores_beside_gpu(threads)):
                [copy] = measure_copy(num_bytes, (packers,), watch, _COPY_BESIDE, pin=True)
        with busy_copies(num_bytes, packers):
            copies = issue(_ISSUE_BESIDE)
        return Beside(copy.rate, _times(optimizer, alone), _times(copies, alone))

    def _try(self, what: str, measure: Callable[[], T]) -> T | None:
        """What `measure` finds; None, and a note, where this machine refuses it."""
        self.say(what)
        try:
            return measure()
        except (DeviceError, PlanError, StorageError, torch.OutOfMemoryError) as error:
            self._note(f"{what}: not measured: {str(error).splitlines()[0]}")
            return None

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self.say(f"note: {text}")


def _times(beside: IssueCost, alone: IssueCost) -> IssueTimes:
    return IssueTimes(
        max(1.0, beside.forward / alone.forward), max(1.0, beside.backward / alone.backward)
    )
