"""A measured machine as a table."""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatrain_cli.plan.machine_file import MachineFacts, MachineFile
from megatrain_cli.plan.rates import (
    LONG_ROW,
    NARROW_WIDTH,
    SHORT_ROW,
    WIDE_WIDTH,
    ComputeRates,
    IssueTimes,
    MachineRates,
    ThreadRate,
)
from megatrain_cli.report.plan_view import print_table, say
from megatrain_cli.units import show_bytes, show_number

_ABSENT = "not measured"


def show_machine(file: MachineFile, console: Console) -> None:
    """Print what there is and what was measured; rates in powers of ten, sizes in powers of two."""
    table = Table.grid(padding=(0, 2))
    for label, text in (*_machine_rows(file), *_fact_rows(file.facts)):
        table.add_row(Text(label, style="bold"), Text(text))
    if file.machine.rates is not None:
        for label, text in _rate_rows(file.machine.rates):
            table.add_row(Text(label, style="bold"), Text(text))
    print_table(table, console)
    for note in file.notes:
        say(f"note: {note}", console)


def _machine_rows(file: MachineFile) -> Iterator[tuple[str, str]]:
    machine, there = file.machine, file.fingerprint
    yield "measured", file.date
    yield "CPU", f"{there.cpu}, {machine.num_cores} of {show_number(there.cores, 'core')} usable"
    free = f"{show_bytes(machine.host_bytes)} may be taken ({machine.host_source})"
    yield "RAM", f"{there.ram_gib} GiB, {free}"
    if machine.has_cuda:
        driver = f", driver {there.driver}" if there.driver else ""
        yield "GPU", f"{machine.device_name}, {show_bytes(machine.device_bytes)} free{driver}"
    else:
        yield "GPU", "none"


def _fact_rows(facts: MachineFacts) -> Iterator[tuple[str, str]]:
    if facts.memory_limit_bytes is not None:
        limit = show_bytes(facts.memory_limit_bytes)
        yield "memory limit", f"{limit} ({facts.memory_limit_source})"
    if facts.cpu_quota is not None:
        yield "CPU quota", f"{facts.cpu_quota} cores"
    yield "cores allowed", facts.affinity or "all"
    for node in facts.numa_nodes:
        here = ", with the GPU" if node.index == facts.device_numa_node else ""
        yield f"NUMA node {node.index}", f"cores {node.cores}, {show_bytes(node.num_bytes)}{here}"
    locked = facts.memlock_bytes
    yield "memlock limit", "none" if locked is None else show_bytes(locked)
    yield "huge pages", facts.huge_pages or "not there"


def _rate_rows(rates: MachineRates) -> Iterator[tuple[str, str]]:
    for point in rates.link or ():
        one_way = f"to the GPU {_gb(point.to_device)}, back {_gb(point.to_host)}"
        both = f"both at once {_gb(point.both_ways)} each"
        yield f"link, {show_bytes(point.num_bytes)}", f"{one_way}, {both}"
    if rates.link is None:
        yield "link", _ABSENT
    yield "copy in RAM", _by_threads(rates.copy, 1e9, "GB/s")
    pinned = rates.copy_to_pinned
    yield "copy to page-locked", _ABSENT if pinned is None else _by_threads(pinned, 1e9, "GB/s")
    yield "read of RAM", _by_threads(rates.read, 1e9, "GB/s")
    yield "Adam", _by_threads(rates.adam, 1e9, "G parameters/s")
    if rates.lockable_bytes is None:
        yield "page-locking", _ABSENT
    else:
        end = "more was refused" if rates.lockable_refused else "more was not tried"
        yield "page-locking", f"{show_bytes(rates.lockable_bytes)} worked, {end}"
    if rates.compute is None:
        yield "compute", _ABSENT
    else:
        gpu = rates.compute
        yield "matrix product", f"{gpu.matmul / 1e12:.4g} TFLOPS"
        compiled = gpu.compiled_layer
        also = "compiled " + (_ABSENT if compiled is None else f"{compiled / 1e12:.4g} TFLOPS")
        yield "decoder layer", f"{gpu.layer / 1e12:.4g} TFLOPS, {also}"
        yield from _issue_rows(gpu)
    if rates.beside is not None:
        packed = _gb(rates.beside.copy_to_pinned)
        longer = _longer(rates.beside.optimizer)
        yield "beside the optimizer", f"copies {packed}, issuing takes {longer}"
        yield "beside copies", f"issuing takes {_longer(rates.beside.copies)}"
    if rates.cpu is not None:
        cpu = rates.cpu
        for name, layer in (("FP32", cpu.float32), ("BF16", cpu.bfloat16)):
            wide = f"{layer.wide_long / 1e9:.4g} and {layer.wide_short / 1e9:.4g} GFLOPS at width"
            narrow = f"{layer.narrow_long / 1e9:.4g} and {layer.narrow_short / 1e9:.4g} at"
            found = f"{wide} {WIDE_WIDTH}, {narrow} {NARROW_WIDTH}"
            yield f"layer on the cores, {name}", f"{found} (rows of {LONG_ROW}, {SHORT_ROW})"
            kernels = f"{1e3 * layer.new_product:.2g} ms a product for a new length of rows"
            sums, logits = layer.sums.more / 1e9, layer.logits / 1e9
            also = f"sums {sums:.3g} G parameters/s, logits {logits:.3g} G/s"
            yield f"beside it, {name}", f"{kernels}, {also}"
        yield "new memory", _gb(cpu.fresh)
    if rates.disk is None:
        yield "disk", _ABSENT
    else:
        way = "O_DIRECT" if rates.disk.direct else "through the page cache"
        yield "disk", f"write {_gb(rates.disk.write)}, read {_gb(rates.disk.read)}, {way}"


def _issue_rows(gpu: ComputeRates) -> Iterator[tuple[str, str]]:
    for name, cost in (("eager", gpu.issue), ("compiled", gpu.compiled_issue)):
        if cost is not None:
            both = f"{1e3 * cost.forward:.2f} ms forward, {1e3 * cost.backward:.2f} ms backward"
            yield f"issuing a layer, {name}", both


def _longer(times: IssueTimes) -> str:
    return f"{times.forward:.2f} x as long forward, {times.backward:.2f} x backward"


def _by_threads(points: Sequence[ThreadRate], unit: float, name: str) -> str:
    shown = ", ".join(f"{point.threads}: {point.rate / unit:.3g}" for point in points)
    return f"{shown} {name} by threads"


def _gb(rate: float) -> str:
    return f"{rate / 1e9:.3g} GB/s"
