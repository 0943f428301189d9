"""The bill: one function an owner of bytes, with its formula.

Places are `host pageable`, `host pinned` and `device`. On the CPU the device's buffers are host
memory too.
"""

from dataclasses import dataclass

from megatrain_cli.model.layout import LayerLayout
from megatrain_cli.model.spec import LayerSpec, ModelSpec, ParamSpec
from megatrain_cli.plan.checkpoints import IO_CHUNK_BYTES, IO_CHUNKS
from megatrain_cli.plan.decide import Decisions
from megatrain_cli.plan.measured import Measured
from megatrain_cli.plan.tiles import DTYPE_BYTES, PAGE_BYTES, slab_bytes, store_bytes
from megatrain_cli.units import MIB, round_up, show_bytes

PAGEABLE, PINNED, DEVICE = "host pageable", "host pinned", "device"

# Interpreter, torch, transformers and Numba. CPU build of torch 2.13 on Linux x86-64: 423 MiB
# before the store exists, then Numba's compiler and torch's buffers. CUDA build of torch 2.11 on an
# H200, 2026-11-29: what the peak of a run that compiles left after its tiles (3B, 8 rows of 1024:
# 2.23 GiB); eager runs from 0.5B to 7B left 1900 MiB at most.
CPU_PROGRAM_BYTES = 550 * MIB
CUDA_PROGRAM_BYTES = 2300 * MIB
# Context, cuBLAS workspaces and kernels: device memory in use less what torch had reserved, H200.
CUDA_CONTEXT_BYTES = 840 * MIB
# Reserved by torch's caching allocator beside what is in use. Compiled runs on an H200 with torch
# 2.11: 7B with 8 rows of 1024 reached 44.5 GiB where 44.0 were billed with half of this; 3B and 7B
# with up to 64 such rows stayed below their bills.
ALLOCATOR_BYTES = 1024 * MIB

# Factors of the estimates below, from an H200, for plans made before anything is measured. Eager
# norms keep FP32 copies of what they normalise, and a product's backward holds the gradients of
# its inputs beside the graph.
_GRAPH, _COMPILED_GRAPH, _BACKWARD = 1.5, 0.9, 1.3
# Of kept activations: what many blocks of a few sizes leave unused between them.
_FRAGMENTS = 0.01
# Of kept activations: what host RAM was seen to grow by as more of the device is in use, likely for
# the driver's tables of it. In the same runs of 3B, 8, 32 and 64 rows of 1024 took 45.6, 46.4 and
# 47.5 GB of host RAM where 45.6 were billed without this: some 1 % of what the device kept.
_DRIVER_TABLES = 0.01

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


@dataclass(frozen=True)
class Sizes:
    """What the formulas are made of; without `measured`, some are estimates."""

    spec: ModelSpec
    layouts: tuple[LayerLayout, ...]
    decisions: Decisions
    on_gpu: bool
    measured: Measured | None = None

    @property
    def width(self) -> int:
        """Bytes of one element in the compute dtype."""
        return DTYPE_BYTES[self.decisions.dtype]

    @property
    def num_recomputed(self) -> int:
        """Decoder layers whose activations are computed again."""
        return len(self.spec.decoder_layers) - self.decisions.keep_layers

    @property
    def device(self) -> str:
        """Where device buffers are charged."""
        return DEVICE if self.on_gpu else PAGEABLE

    @property
    def tokens(self) -> int:
        """Of one micro-batch, padding included."""
        return self.decisions.micro_batch_size * self.decisions.max_length

    @property
    def hidden_bytes(self) -> int:
        """One micro-batch's hidden states."""
        return self.tokens * self.spec.hidden_size * self.width

    @property
    def largest_numel(self) -> int:
        """Elements of the largest run."""
        return max(layout.numel for layout in self.layouts)


def bill(sizes: Sizes) -> tuple[PlanLine, ...]:
    """Every owner of bytes; owners of nothing are left out."""
    lines = [
        *tiles(sizes),
        program(sizes),
        slabs(sizes),
        gateway(sizes),
        driver_tables(sizes),
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
    """The interpreter and its libraries."""
    num_bytes = CUDA_PROGRAM_BYTES if sizes.on_gpu else CPU_PROGRAM_BYTES
    return PlanLine("program and libraries", PAGEABLE, num_bytes, "measured once")


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


def driver_tables(sizes: Sizes) -> PlanLine:
    """What the driver keeps in host RAM about device memory."""
    share = _DRIVER_TABLES if sizes.on_gpu else 0
    num_bytes = int(share * kept_activations(sizes).num_bytes)
    return PlanLine("driver tables", PAGEABLE, num_bytes, f"{share:.0%} of kept activations")


def bounce_pool(sizes: Sizes) -> PlanLine:
    """Layers that a save copies out of the way; two of the largest, or as much as was asked."""
    num_bytes = sizes.decisions.pool_bytes
    return PlanLine("bounce pool", PAGEABLE, num_bytes, "copies of layers not yet saved")


def checkpoint_chunks(sizes: Sizes) -> PlanLine:
    """Aligned buffers between tiles and disk; there for every run, as each is saved at its end."""
    del sizes
    num_bytes = IO_CHUNKS * IO_CHUNK_BYTES
    formula = f"{IO_CHUNKS} x {show_bytes(IO_CHUNK_BYTES)}"
    return PlanLine("checkpoint chunks", PAGEABLE, num_bytes, formula)


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
    return PlanLine("staging buffers", sizes.device, num_bytes, formula)


def gradient_buffers(sizes: Sizes) -> PlanLine:
    """2 x largest layer: one fills while the other leaves."""
    return PlanLine(
        "gradient buffers", sizes.device, 2 * sizes.largest_numel * sizes.width, "2 x largest layer"
    )


def gradient_sums(sizes: Sizes) -> PlanLine:
    """FP32: head, tied weights, and the largest other layer if there are several micro-batches."""
    layouts = sizes.layouts
    tied = sum(e.param.numel for e in layouts[0].entries if e.param.name in sizes.spec.tied)
    numel = sizes.spec.head.numel + tied
    if sizes.decisions.num_micro_batches > 1:
        numel += max(layout.numel for layout in layouts[:-1])
    return PlanLine("gradient sums", sizes.device, 4 * numel, "4 B x (head + largest layer)")


def layer_inputs(sizes: Sizes) -> PlanLine:
    """One hidden state a layer and micro-batch; two shared ones where inputs are offloaded."""
    d = sizes.decisions
    count = len(sizes.spec.decoder_layers) + 1
    if d.offload:
        count += min(2, sizes.num_recomputed) - sizes.num_recomputed
    count *= d.num_micro_batches
    return PlanLine(
        "layer inputs", sizes.device, count * sizes.hidden_bytes, f"{count} x B x T x D"
    )


def output_gradients(sizes: Sizes) -> PlanLine:
    """One hidden state a micro-batch."""
    count = sizes.decisions.num_micro_batches
    num_bytes = count * sizes.hidden_bytes
    return PlanLine("output gradients", sizes.device, num_bytes, f"{count} x B x T x D")


def kept_activations(sizes: Sizes) -> PlanLine:
    """Kept layers x micro-batches x what one layer's backward needs (see `graph_bytes`)."""
    d = sizes.decisions
    kept = sizes.spec.decoder_layers[sizes.num_recomputed :]
    num_bytes = d.num_micro_batches * sum(graph_bytes(sizes, layer) for layer in kept)
    how = "measured" if sizes.measured else "estimated"
    return PlanLine(
        "kept activations",
        sizes.device,
        num_bytes,
        f"{d.keep_layers} layers x {d.num_micro_batches} x graph of one, {how}",
    )


def working_set(sizes: Sizes) -> PlanLine:
    """One layer at work: its graph and backward, its parameters' gradients, some hidden states."""
    how = "measured" if sizes.measured else f"{_BACKWARD} x graph + gradients + 4 x B x T x D"
    return PlanLine("one layer at work", sizes.device, _layer_at_work(sizes), how)


def head_chunk(sizes: Sizes) -> PlanLine:
    """One chunk of the head at work, as far as it needs more than one layer does."""
    num_bytes = max(0, _chunk_at_work(sizes) - _layer_at_work(sizes))
    how = "measured" if sizes.measured else "logits + gradients"
    return PlanLine("head chunk", sizes.device, num_bytes, f"{how}, beyond a layer")


def _layer_at_work(sizes: Sizes) -> int:
    layers = sizes.spec.decoder_layers
    if sizes.measured:
        peaks = (
            # The graph of a kept layer is on that bill.
            sizes.measured.layer_of(layer.kind, sizes.tokens)
            - (0 if sizes.num_recomputed else graph_bytes(sizes, layer))
            for layer in layers
        )
        return max(peaks)
    graph = max(graph_bytes(sizes, layer) for layer in layers)
    gradients = sizes.largest_numel * sizes.width
    return int(_BACKWARD * graph) + gradients + 4 * sizes.hidden_bytes


def _chunk_at_work(sizes: Sizes) -> int:
    """Logits of a chunk, the weight's gradient, and the positions' hidden states.

    Eager, logits and their gradient in the compute dtype and FP32; compiled, one copy of both in
    the compute dtype.
    """
    if sizes.measured:
        return sizes.measured.head_bytes
    d = sizes.decisions
    logits = min(d.head_chunk, sizes.tokens) * sizes.spec.vocab_size * (2 * sizes.width + 2 * 4)
    logits = max(logits, d.whole_chunk * sizes.spec.vocab_size * sizes.width)
    weight = sizes.spec.vocab_size * sizes.spec.hidden_size * sizes.width
    return logits + weight + 2 * sizes.hidden_bytes


def cuda_context(sizes: Sizes) -> PlanLine:
    """The driver's share."""
    num_bytes = CUDA_CONTEXT_BYTES if sizes.on_gpu else 0
    return PlanLine("CUDA context", DEVICE, num_bytes, "measured once")


def allocator(sizes: Sizes) -> PlanLine:
    """What the caching allocator keeps and nobody uses."""
    kept = int(_FRAGMENTS * kept_activations(sizes).num_bytes)
    num_bytes = ALLOCATOR_BYTES + kept if sizes.on_gpu else 0
    formula = f"{show_bytes(ALLOCATOR_BYTES)} + {_FRAGMENTS:.0%} of kept activations"
    return PlanLine("allocator slack", DEVICE, num_bytes, formula)


def graph_bytes(sizes: Sizes, layer: LayerSpec) -> int:
    """What autograd keeps of one layer and micro-batch; an estimate if it was not measured.

    Every matrix product keeps its input, and what follows it keeps its output: (in + out) elements
    a token, and half as much again for eager norms; compiled ones are computed again. Of experts
    this is so for each one that a token meets. Attention that is not fused also keeps its T x T
    scores, in FP32 and twice.
    """
    if sizes.measured:
        return sizes.measured.graph_of(layer.kind, sizes.tokens)
    d = sizes.decisions
    per_token = sum(map(_in_and_out, layer.params))
    tokens = sizes.tokens
    num_bytes = int((_COMPILED_GRAPH if d.compiled else _GRAPH) * tokens * per_token * sizes.width)
    if d.attention == "eager":
        num_bytes += 2 * 4 * tokens * d.max_length * sizes.spec.num_heads
    return num_bytes


def _in_and_out(param: ParamSpec) -> int:
    """Inputs and outputs of a token's products with one parameter; 0 if it is no matrix."""
    shape = param.shape[1:] if param.visited else param.shape
    return max(1, param.visited) * sum(shape[-2:]) if len(shape) >= 2 else 0
