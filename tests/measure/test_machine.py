"""All parts together on tiny sizes; on a CPU those of a GPU are absent, never made up."""

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatrain_cli.errors import DeviceError
from megatrain_cli.measure.amounts import FULL, Amounts
from megatrain_cli.measure.compute import Layer
from megatrain_cli.measure.link import measure_link
from megatrain_cli.measure.machine import _Work, measure_machine
from megatrain_cli.measure.stopwatch import Stopwatch
from megatrain_cli.model.backward import wake_backward
from megatrain_cli.store.arena import Arena
from megatrain_cli.units import MIB
from tests.plan.small import CPU

TINY = Amounts(
    link_bytes=(1 << 16, 1 << 18),
    copy_bytes=1 << 18,
    adam_numel=1 << 14,
    lock_step_bytes=1 << 20,
    disk_bytes=16 * MIB,
    matmul_size=256,
    layer_width=128,
    layer_tokens=(2, 64),
)


def test_a_cpu_has_no_numbers_of_a_gpu_and_all_others(tmp_path: Path) -> None:
    said: list[str] = []
    file = measure_machine("cpu", tmp_path, TINY, said.append)
    rates = file.machine.rates
    assert rates is not None
    assert (rates.link, rates.copy_to_pinned, rates.lockable_bytes, rates.compute) == (None,) * 4
    assert rates.beside is None
    assert rates.copy[-1].threads == rates.adam[-1].threads == file.machine.num_cores
    assert rates.disk is not None
    assert rates.cpu is not None
    assert said[:5] == [
        "copies from memory to memory",
        "reads of memory",
        "the optimizer",
        "the disk",
        "a layer on the cores",
    ]
    assert len(said) == 5 + len(file.notes)
    assert file.fingerprint.gpu == ""


def test_a_disk_that_refuses_is_a_note_and_the_rest_goes_on(tmp_path: Path) -> None:
    said: list[str] = []
    file = measure_machine("cpu", tmp_path / "none", TINY, said.append)
    assert file.machine.rates is not None
    assert file.machine.rates.disk is None
    [note] = file.notes
    assert note.startswith(f"the disk: not measured: {tmp_path / 'none'}: No such file")
    assert said[-2:] == [f"note: {note}", "a layer on the cores"]


def test_memory_that_the_system_does_not_give_is_a_note(tmp_path: Path) -> None:
    said: list[str] = []
    work = _Work(CPU, TINY, tmp_path, said.append, Stopwatch(30.0))
    assert work._try("all of it", lambda: Arena(1 << 62)) is None
    [note] = work.notes
    assert note.startswith("all of it: not measured: The system refused to map")
    assert said == ["all of it", f"note: {note}"]


def test_with_no_time_left_each_part_is_measured_once(tmp_path: Path) -> None:
    file = measure_machine("cpu", tmp_path, TINY, lambda text: None, Stopwatch(0.0))
    assert file.machine.rates is not None


def test_a_gpu_that_is_not_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="0 CUDA"):
        measure_machine("cuda", tmp_path, TINY, lambda text: None)


@pytest.mark.gpu
def test_a_link_has_rates_for_each_size_and_large_copies_are_not_slower() -> None:
    device = torch.device("cuda:0")
    sizes = (256 << 10, 4 << 20, 64 << 20)
    found = measure_link(device, sizes, Stopwatch(30.0), 5.0)
    assert [point.num_bytes for point in found] == list(sizes)
    small, _, large = found
    assert large.to_device > 0.8 * small.to_device
    for point in found:
        assert point.both_ways < 1.2 * min(point.to_device, point.to_host)


@pytest.mark.gpu
def test_copies_over_the_link_arrive() -> None:
    """What is timed is a copy: the same work with bytes that can be told apart."""
    from megatrain_cli.measure.link import _Copy, _seconds
    from megatrain_cli.measure.memory import arrays

    device = torch.device("cuda:0")
    with arrays(1 << 20, pin=True) as (_, pinned):
        target = torch.zeros(1 << 20, dtype=torch.uint8, device=device)
        torch.cuda.current_stream(device).synchronize()
        assert _seconds([_Copy(torch.cuda.Stream(device), target, pinned)], 2) > 0
        assert torch.equal(target.cpu(), pinned)


@pytest.mark.gpu
def test_a_gpu_machine_is_measured_whole(tmp_path: Path) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    layer = Layer(device, 128, (2, 16))
    wake_backward(device)
    layer.run(layer.module)  # torch keeps what products work in, for each of its threads
    del layer
    gc.collect()
    before = torch.cuda.memory_allocated()
    amounts = replace(TINY, layer_width=FULL.layer_width)
    file = measure_machine("cuda", tmp_path, amounts, lambda text: None)
    rates = file.machine.rates
    assert rates is not None
    assert rates.link is not None
    assert rates.copy_to_pinned is not None
    assert rates.lockable_bytes is not None
    assert rates.compute is not None
    assert rates.compute.compiled_layer is not None or any("compile" in n for n in file.notes)
    assert rates.compute.issue is not None
    assert min(rates.compute.issue.forward, rates.compute.issue.backward) > 1e-5
    assert rates.beside is not None
    assert file.fingerprint.gpu == torch.cuda.get_device_name(0)
    gc.collect()  # compiling leaves cycles of objects
    assert torch.cuda.memory_allocated() == before
