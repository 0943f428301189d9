"""The bill: one function an owner of bytes, with its formula.

Places are `host pageable`, `host mapped`, `host pinned` and `device`. On the CPU the device's
buffers are host memory too. Mapped are pages of files: part of the resident set that is planned and
measured, but nothing that a machine must have, as they leave when RAM is short.

What no line has, because the peak of a run comes later: loading holds one layer's mapped file
beside a store whose moments nobody has touched, and evaluating takes no more than a step but for
the kernels that it keeps.
"""

from dataclasses import dataclass

from megatrain_cli.plan.checkpoints import (
    IO_CHUNK_BYTES,
    IO_CHUNKS,
    THREAD_BYTES,
    buffered_bytes,
)
from megatrain_cli.plan.estimates import (
    Sizes,
    backward_factor,
    chunk_at_work,
    graph_bytes,
    kept_bytes,
    layer_at_work,
)
from megatrain_cli.plan.heap import small_blocks
from megatrain_cli.plan.kernels import kernel_bytes
from megatrain_cli.plan.tiles import PAGE_BYTES, slab_bytes, store_bytes
from megatrain_cli.units import MIB, round_up, show_bytes, show_number

PAGEABLE, MAPPED, PINNED, DEVICE = "host pageable", "host mapped", "host pinned", "device"

# Interpreter, torch, transformers and tokenizer before a store exists; the process that plans looks
# at itself, and this is for plans of another machine. CPU build of torch 2.13, Linux x86-64.
CPU_PROGRAM_BYTES = 430 * MIB
# What comes later on the CPU: Numba's kernels (44 MiB), threads and their heaps, and code of
# torch's that is first used in a step. Fitted to the runs of scripts/check_plan.py.
CPU_LATER_BYTES = 80 * MIB
# CUDA build of torch 2.11 on an H200, 2026-11-30: what the peak of a run that compiles left after
# its tiles (3B and 7B, 8 and 64 rows of 1024: 2028 to 2093 MiB).
CUDA_PROGRAM_BYTES = 2060 * MIB
# Context, cuBLAS workspaces and kernels: device memory in use less what torch had reserved, H200.
CUDA_CONTEXT_BYTES = 840 * MIB
# Reserved by torch's caching allocator beside what is in use, H200, torch 2.11, 2026-11-30: 0.4 GiB
# where all was computed again, and more where kept blocks of a few sizes have room between them: up
# to 1.4 GiB beside 118 GiB of 22 layers, but 4.1 beside 93 GiB of 5, whose blocks are larger.
ALLOCATOR_BYTES = 640 * MIB
_FRAGMENTS, _GRAPH_FRAGMENTS = 0.0125, 0.2
# What glibc's heap leaves unused on the CPU: a share of kept activations, and between those of a
# layer some holes as large as a hidden state. Torch asks for aligned blocks, and a hole has no room
# for an aligned block of its own size (glibc 2.36: 3.5 a layer with rows of 1024 x 512 in FP32).
_HEAP_FRAGMENTS, _HEAP_HOLES = 0.05, 3

_REGION_NAMES = {
    "weights": "weights",
    "gradient": "gradients",
    "remainder": "master remainders",
    "master": "masters",
    "exp_avg": "first moments",
    "exp_avg_sq": "second moments",
}


@dataclass(frozen=True)
class PlanLine:
    """One row of the bill."""

    owner: str
    place: str
    num_bytes: int
    formula: str


def device_of(sizes: Sizes) -> str:
    """Where device buffers are charged."""
    return DEVICE if sizes.on_gpu else PAGEABLE


def bill(sizes: Sizes) -> tuple[PlanLine, ...]:
    """Every owner of bytes; owners of nothing are left out."""
    lines = [
        *tiles(sizes),
        program(sizes),
        rows(sizes),
        kernels(sizes),
        slabs(sizes),
        gateway(sizes),
        bounce_pool(sizes),
        checkpoint_chunks(sizes),
        offloaded_inputs(sizes),
        staging_buffers(sizes),
        gradient_buffers(sizes),
        gradient_sums(sizes),
        layer_inputs(sizes),
        output_gradients(sizes),
        kept_activations(sizes),
        working_set(sizes),
        head_chunk(sizes),
        cuda_context(sizes),
        allocator(sizes),
    ]
    return tuple(line for line in lines if line.num_bytes)


def tiles(sizes: Sizes) -> list[PlanLine]:
    """Each kind of state of all layers: elements x width, in whole pages a layer."""
    fmt = sizes.decisions.tile_format
    lines = []
    for region, num_bytes in store_bytes(sizes.layouts, fmt).items():
        crosses_link = region in ("weights", "gradient")
        place = PINNED if sizes.decisions.pin_store and crosses_link else PAGEABLE
        width = num_bytes / max(1, sizes.spec.num_parameters)
        lines.append(
            PlanLine(_REGION_NAMES[region], place, num_bytes, f"{width:.3g} B x parameters")
        )
    return lines


def program(sizes: Sizes) -> PlanLine:
    """The interpreter and its libraries: on the CPU as this process has them, and what follows."""
    if sizes.on_gpu:
        return PlanLine("program and libraries", PAGEABLE, CUDA_PROGRAM_BYTES, "measured once")
    now = sizes.program_bytes or CPU_PROGRAM_BYTES
    how = "this process's" if sizes.program_bytes else "measured once"
    formula = f"{show_bytes(now)} {how} + {show_bytes(CPU_LATER_BYTES)}"
    return PlanLine("program and libraries", PAGEABLE, now + CPU_LATER_BYTES, formula)


def kernels(sizes: Sizes) -> PlanLine:
    """BF16 on the CPU: see `plan/kernels.py`."""
    num_bytes, d, rows = 0, sizes.decisions, sizes.rows
    if not sizes.on_gpu and rows is not None and d.dtype == "bfloat16":
        num_bytes = kernel_bytes(sizes.spec, rows, fused=d.attention != "eager")
    return PlanLine(
        "kernels", PAGEABLE, num_bytes, "oneDNN's, for each length and number of targets"
    )


def rows(sizes: Sizes) -> PlanLine:
    """The arrays that rows lie in, once they are known: all pages are read to prove them."""
    num_bytes = 0 if sizes.rows is None else sizes.rows.mapped_bytes
    return PlanLine("rows", MAPPED, num_bytes, "tokens, targets and places of all rows")


def slabs(sizes: Sizes) -> PlanLine:
    """K x largest decoder layer."""
    d = sizes.decisions
    num_bytes = slab_bytes(d.num_slabs, d.slab_numel * sizes.width)
    place = PINNED if sizes.on_gpu else PAGEABLE
    return PlanLine("gradient slabs", place, num_bytes, f"{d.num_slabs} x largest decoder layer")


def gateway(sizes: Sizes) -> PlanLine:
    """A ring of whole chunks, at most 2 x largest layer; before a pageable store on a GPU."""
    needed = sizes.on_gpu and not sizes.decisions.pin_store
    num_bytes = 2 * round_up(sizes.largest_numel * sizes.width, PAGE_BYTES) if needed else 0
    return PlanLine("pinned staging", PINNED, num_bytes, "2 x largest layer")


def bounce_pool(sizes: Sizes) -> PlanLine:
    """Layers that a save copies out of the way; two of the largest, or as much as was asked."""
    num_bytes = sizes.decisions.pool_bytes
    return PlanLine("bounce pool", PAGEABLE, num_bytes, "copies of layers not yet saved")


def checkpoint_chunks(sizes: Sizes) -> PlanLine:
    """What saving takes a thread; there for every run, as each is saved at its end.

    Ordinary memory that lies aligned goes to the disk from there. What does not passes through a
    buffer of a thread's own: beside steps it comes on top, and at a run's end, where no step is
    under way, it is in room that layer and head had. Page-locked memory the system may refuse: then
    all passes through an aligned buffer.
    """
    if sizes.on_gpu:
        each = THREAD_BYTES + IO_CHUNK_BYTES
        formula = f"{IO_CHUNKS} x {show_bytes(each)}"
        return PlanLine("checkpoint chunks", PAGEABLE, IO_CHUNKS * each, formula)
    buffers = buffered_bytes(sizes.layouts, sizes.decisions.tile_format)
    formula = f"{IO_CHUNKS} x {show_bytes(THREAD_BYTES)} + buffers"
    if not sizes.decisions.saves_beside:
        mapped = max(layer_at_work(sizes) - small_blocks(sizes), chunk_at_work(sizes))
        buffers = max(0, buffers - mapped)
        formula += ", beyond a step's work"
    return PlanLine("checkpoint chunks", PAGEABLE, IO_CHUNKS * THREAD_BYTES + buffers, formula)


def offloaded_inputs(sizes: Sizes) -> PlanLine:
    """Inputs of recomputed layers x micro-batches."""
    d = sizes.decisions
    count = sizes.num_recomputed * d.num_micro_batches
    num_bytes = count * round_up(sizes.hidden_bytes, PAGE_BYTES) if d.offload else 0
    place = PINNED if sizes.on_gpu else PAGEABLE
    return PlanLine("offloaded inputs", place, num_bytes, f"{count} x B x T x D")


def staging_buffers(sizes: Sizes) -> PlanLine:
    """Slots x largest decoder layer, and what embedding and head lie in."""
    d = sizes.decisions
    num_bytes = (d.num_slots * d.slot_numel + d.ends_numel) * sizes.width
    formula = f"{d.num_slots} x largest decoder layer + embedding and head"
    return PlanLine("staging buffers", device_of(sizes), num_bytes, formula)


def gradient_buffers(sizes: Sizes) -> PlanLine:
    """2 x largest layer: one fills while the other leaves."""
    return PlanLine(
        "gradient buffers",
        device_of(sizes),
        2 * sizes.largest_numel * sizes.width,
        "2 x largest layer",
    )


def gradient_sums(sizes: Sizes) -> PlanLine:
    """FP32: head, tied weights, and the largest other layer if there are several micro-batches."""
    layouts = sizes.layouts
    tied = sum(e.param.numel for e in layouts[0].entries if e.param.name in sizes.spec.tied)
    numel = sizes.spec.head.numel + tied
    if sizes.decisions.num_micro_batches > 1:
        numel += max(layout.numel for layout in layouts[:-1])
    return PlanLine("gradient sums", device_of(sizes), 4 * numel, "4 B x (head + largest layer)")


def layer_inputs(sizes: Sizes) -> PlanLine:
    """One hidden state a layer and micro-batch; two shared ones where inputs are offloaded."""
    d = sizes.decisions
    count = len(sizes.spec.decoder_layers) + 1
    if d.offload:
        count += min(2, sizes.num_recomputed) - sizes.num_recomputed
    count *= d.num_micro_batches
    return PlanLine(
        "layer inputs", device_of(sizes), count * sizes.hidden_bytes, f"{count} x B x T x D"
    )


def output_gradients(sizes: Sizes) -> PlanLine:
    """One hidden state a micro-batch."""
    count = sizes.decisions.num_micro_batches
    num_bytes = count * sizes.hidden_bytes
    return PlanLine("output gradients", device_of(sizes), num_bytes, f"{count} x B x T x D")


def kept_activations(sizes: Sizes) -> PlanLine:
    """Kept layers x tokens of a step x what one layer's backward needs (see `graph_bytes`)."""
    how = "measured" if sizes.measured else "estimated"
    layers = show_number(sizes.decisions.keep_layers, "layer")
    tokens = show_number(sizes.step_tokens, "token")
    formula = f"{layers} x graph of {tokens}, {how}"
    return PlanLine("kept activations", device_of(sizes), kept_bytes(sizes), formula)


def working_set(sizes: Sizes) -> PlanLine:
    """One layer at work, beside kept graphs: what backward holds, its parameters' gradients."""
    how = "measured" if sizes.measured else f"{backward_factor(sizes)} x graph + gradients"
    how += ", less what is kept" if sizes.decisions.keep_layers else ""
    return PlanLine("one layer at work", device_of(sizes), layer_at_work(sizes), how)


def head_chunk(sizes: Sizes) -> PlanLine:
    """One chunk of the head at work, as far as it needs more than one layer gives back."""
    left = 0 if sizes.on_gpu else max(0, small_blocks(sizes) - kept_bytes(sizes))
    num_bytes = max(0, chunk_at_work(sizes) - layer_at_work(sizes) + left)
    how = "measured" if sizes.measured else "logits + gradients"
    return PlanLine("head chunk", device_of(sizes), num_bytes, f"{how}, beyond a layer")


def cuda_context(sizes: Sizes) -> PlanLine:
    """The driver's share."""
    num_bytes = CUDA_CONTEXT_BYTES if sizes.on_gpu else 0
    return PlanLine("CUDA context", DEVICE, num_bytes, "measured once")


def allocator(sizes: Sizes) -> PlanLine:
    """What torch's caching allocator, or on the CPU glibc's heap, keeps and nobody uses."""
    kept, layers = kept_bytes(sizes), sizes.decisions.keep_layers
    if not sizes.on_gpu:
        hidden_states = _HEAP_HOLES * layers
        formula = f"{_HEAP_FRAGMENTS:.0%} of kept activations + {hidden_states} hidden states"
        holes = hidden_states * sizes.step_tokens * sizes.spec.hidden_size * sizes.width
        num_bytes, again = int(_HEAP_FRAGMENTS * kept) + holes, small_blocks(sizes)
        if again > num_bytes:
            formula, num_bytes = "small blocks of a layer at work, once more", again
        return PlanLine("allocator slack", PAGEABLE, num_bytes, formula)
    formula, num_bytes = show_bytes(ALLOCATOR_BYTES), ALLOCATOR_BYTES
    if kept:
        graph = max(graph_bytes(sizes, layer) for layer in sizes.spec.decoder_layers)
        num_bytes += int(_FRAGMENTS * kept + _GRAPH_FRAGMENTS * graph)
        formula += f" + {_FRAGMENTS:.2%} of kept activations + {_GRAPH_FRAGMENTS:.0%} of a layer's"
    return PlanLine("allocator slack", DEVICE, num_bytes, formula)
