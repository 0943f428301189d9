"""Turn what was asked into what will be done: an `auto` becomes a value here, see `decide`."""

import math
from dataclasses import dataclass

from megatrain_cli.config.schema import KeepLayers, TrainConfig
from megatrain_cli.model.layout import LayerLayout
from megatrain_cli.model.spec import ModelSpec
from megatrain_cli.plan.activations import Activations
from megatrain_cli.plan.checkpoints import most_pool_bytes
from megatrain_cli.plan.machine import MachineSpec
from megatrain_cli.plan.measured import Measured
from megatrain_cli.plan.row_facts import RowFacts
from megatrain_cli.plan.tiles import DTYPE_BYTES, ComputeDtype, TileFormat
from megatrain_cli.units import MIB, round_up

# FP32 logits of one chunk of the eager head. Their size is chunk x vocabulary, and a few copies of
# them are alive at once, so this bounds the head whatever the length and the vocabulary.
HEAD_CHUNK_BYTES = 512 * MIB

# The compiled head holds one copy of its logits in the compute dtype. 4096 positions reach 600
# TFLOPS at 2048 x 151936 on an H200, as 8192 do; 2048 reach 565.
WHOLE_CHUNK = 4096
WHOLE_CHUNK_BYTES = 4096 * MIB


# Tokens that pass through a layer at once where micro-batches are joined. On an H200, at the 3B
# shape, 8 micro-batches of 4096 tokens took 13 % longer than one of 32768: kernels are short, and
# each micro-batch's gradient is added in FP32.
PASS_TOKENS = 32768


# Of a pageable store, to pack weights and to take gradients in. One core copies 5 to 7 GB/s and RAM
# ends at 23 to 47 (H200 machine, 16 cores): four give most of that, and more would take RAM
# bandwidth and cores from the optimizer, which runs beside them.
_COPY_THREADS = 4


@dataclass(frozen=True)
class Decisions:
    """All that shapes memory and order of a run.

    Attributes:
        pin_store: Tiles' weights and gradients are page-locked in place; otherwise the store is
            ordinary memory.
        num_slabs: 0 where gradients land straight in their tiles.
        slab_numel: Elements of a slab: the largest decoder layer's run.
        slot_numel: Elements of a decoder layer's device slot: the largest one's run.
        ends_numel: Elements of the slots of embedding and head: of both when they are tied, of the
            larger one otherwise.
        keep_layers: How many decoder layers, the last ones, keep their activations.
        micro_batch_size: Rows that pass through a layer at once: 1 on the CPU, whatever was asked;
            on a GPU several micro-batches' rows where they fit (`joined`).
        joined: How many of the config's micro-batches pass together.
        compiled: Layers and head are compiled; all rows of a run then have one length.
        head_chunk: Positions per chunk of the eager head.
        whole_chunk: Positions per chunk of the compiled head; 0 if nothing is compiled.
        target_utilization: Share of the link's peak that copies of a pageable store must reach.
        deterministic: Kernels on the device must repeat bit for bit; those of a CPU do anyway.
        pool_bytes: Host memory for layers that a save copies out of the way of their updates.
        saves_beside: Whether steps go on while a checkpoint is written.
    """

    dtype: ComputeDtype
    attention: str
    tile_format: TileFormat
    eager: bool
    pin_store: bool
    num_slots: int
    slot_numel: int
    ends_numel: int
    num_slabs: int
    slab_numel: int
    micro_batch_size: int
    joined: int
    num_micro_batches: int
    max_length: int
    keep_layers: int
    offload: bool
    compiled: bool
    head_chunk: int
    whole_chunk: int
    threads: int
    target_utilization: float
    deterministic: bool
    pool_bytes: int
    saves_beside: bool


@dataclass(frozen=True)
class Before:
    """What `auto` had chosen that last bits may depend on, in the run that goes on.

    Attributes:
        joined, keep_layers, offload: As in `Decisions`.
    """

    joined: int
    keep_layers: int
    offload: bool


@dataclass(frozen=True)
class Known:
    """What a run finds out after its first plan, and plans again with.

    Attributes:
        before: Chosen again wherever it fits, however much memory is free now.
        can_pin: False after the driver refused to page-lock the store.
        joined: How many micro-batches pass at once, once that was tried on the device.
        can_compile: False after `torch.compile` failed.
        length: Tokens of the longest row, rounded up for the kernels, once the data is known.
        rows: What else the data says, once it is known.
        rows_from: For a person, how far the data was looked at.
        measured: From the rehearsal, once it has been.
    """

    before: Before | None = None
    can_pin: bool = True
    joined: int | None = None
    can_compile: bool = True
    length: int | None = None
    rows: RowFacts | None = None
    rows_from: str = ""
    measured: Measured | None = None


def decide(
    config: TrainConfig,
    spec: ModelSpec,
    layouts: tuple[LayerLayout, ...],
    machine: MachineSpec,
    known: Known,
    *,
    joined: int = 1,
) -> Decisions:
    """Resolve every `auto` of the engine but those that need the bill, activations and pool.

    Those are `make_plan`'s; the device is `probe_machine`'s, and preparing rows is the data's.

    Args:
        config: What was asked.
        spec: The model.
        layouts: Of all layers, in order.
        machine: What there is.
        known: What has been learned since the first plan.
        joined: How many micro-batches pass at once; see `ways_to_join`.
    """
    eager = config.optimizer.update == "eager"
    pin = machine.has_cuda and config.store.memory != "pageable" and known.can_pin
    accumulation = config.train.gradient_accumulation_steps
    rows = config.train.micro_batch_size
    if not machine.has_cuda:
        # A CPU gains nothing from a rectangle of rows, and pays for its padding.
        rows, accumulation = 1, rows * accumulation
    rows, accumulation = rows * joined, accumulation // joined
    # With page-locked tiles and deferred updates nothing would be gained by a stop on the way.
    direct = pin and not eager
    slabs = config.pipeline.grad_slabs
    asked = config.train.gradient_accumulation_steps
    num_slabs = max(2, math.ceil(1.5 * asked)) if slabs == "auto" else slabs
    activations = _asked_activations(config, spec)
    longest = _longest_row(config, spec, known)
    body = spec.decoder_layers
    slab_numel = max(layout.numel for layout in layouts[1 : len(body) + 1])
    # A step's pieces take slabs in turn, from the first on: more slabs than pieces would lie idle.
    pieces = sum(-(-layout.numel // slab_numel) for layout in layouts)
    num_slabs = min(num_slabs, pieces)
    ends = layouts[0].numel, layouts[-1].numel
    # A model with dropout stays eager: a compiled forward without a graph and one with a graph draw
    # other masks from the same seed, and a layer that is computed twice needs the same ones.
    compiled = can_be_compiled(spec, machine) and known.can_compile
    compiled = compiled and config.pipeline.compile is not False
    whole = WHOLE_CHUNK_BYTES // (DTYPE_BYTES[config.model.dtype] * spec.vocab_size)
    whole = min(whole, WHOLE_CHUNK, round_up(rows * longest, 64))
    chunk = HEAD_CHUNK_BYTES // (4 * spec.vocab_size)
    threads = config.optimizer.threads
    fmt = TileFormat(config.model.dtype, config.optimizer.master, not eager)
    saves = config.checkpoint
    pool = 0 if saves.bounce_pool == "auto" or not saves.async_save else saves.bounce_pool
    return Decisions(
        dtype=config.model.dtype,
        attention=attention_of(config),
        tile_format=fmt,
        eager=eager,
        pin_store=pin,
        # Decoder layers take turns in slots: more of them would lie idle.
        num_slots=min(config.pipeline.staging_buffers, len(body)),
        slot_numel=slab_numel,
        ends_numel=sum(ends) if spec.tied else max(ends),
        num_slabs=0 if direct else num_slabs,
        slab_numel=slab_numel,
        micro_batch_size=rows,
        joined=joined,
        num_micro_batches=accumulation,
        max_length=longest,
        keep_layers=activations.keep_layers,
        offload=activations.offload,
        compiled=compiled,
        head_chunk=max(64, chunk // 64 * 64),
        whole_chunk=max(64, whole // 64 * 64) if compiled else 0,
        threads=optimizer_threads(machine, copies=not pin) if threads == "auto" else threads,
        target_utilization=config.pipeline.target_pcie_utilization,
        deterministic=machine.has_cuda and config.train.deterministic,
        pool_bytes=min(pool, most_pool_bytes(layouts, fmt)),
        saves_beside=saves.async_save and saves.save_steps is not None,
    )


def ways_to_join(
    config: TrainConfig, spec: ModelSpec, machine: MachineSpec, known: Known
) -> tuple[int, ...]:
    """How many micro-batches may pass through a layer at once, the most first; 1 comes last.

    The sums are the same for any division of a step's rows, so this is a matter of memory alone.
    Models with dropout keep to what was asked: their masks are drawn for each micro-batch.
    """
    accumulation = config.train.gradient_accumulation_steps
    # Advice asks for other numbers of micro-batches than the one that was tried.
    if known.joined is not None and accumulation % known.joined == 0:
        return (known.joined,)
    most = most_joined(config, spec, machine, known)
    ways = [n for n in range(most, 1, -1) if accumulation % n == 0]
    return (*ways, 1)


def most_joined(config: TrainConfig, spec: ModelSpec, machine: MachineSpec, known: Known) -> int:
    """How many micro-batches would pass at once if each number of them divided a step's."""
    if not machine.has_cuda or spec.has_dropout:
        return 1
    tokens = config.train.micro_batch_size * _longest_row(config, spec, known)
    return max(1, min(PASS_TOKENS // tokens, config.train.gradient_accumulation_steps))


def optimizer_threads(machine: MachineSpec, *, copies: bool) -> int:
    """What `optimizer.threads: auto` is.

    Beside a GPU one core stays free for the thread that feeds it, and where the store `copies`, one
    for each thread that packs, if these are no more than a quarter of the cores: 3B at 32 x 1024
    took 1.619 s so, and 1.743 with 15 optimizer threads (H200 machine, 16 cores).
    """
    if not machine.has_cuda:
        return machine.num_cores
    packers = _COPY_THREADS if copies and machine.num_cores // 4 >= _COPY_THREADS else 0
    return max(1, machine.num_cores - 1 - packers)


def copy_threads(machine: MachineSpec) -> int:
    """Of each pool that copies within host memory: what packs, and what takes gradients in."""
    return min(_COPY_THREADS, max(1, machine.num_cores - 1))


def attention_of(config: TrainConfig) -> str:
    """`sdpa`, `eager`, or `packed` where rows hold several documents."""
    if config.data.packing:
        return "packed"
    return "sdpa" if config.model.attention == "auto" else config.model.attention


def can_be_compiled(spec: ModelSpec, machine: MachineSpec) -> bool:
    """Whether `torch.compile` may be used: one shape for all rows, and no dropout.

    On the CPU rows come one by one, each at its own length.
    """
    return machine.has_cuda and not spec.has_dropout


def _longest_row(config: TrainConfig, spec: ModelSpec, known: Known) -> int:
    """Tokens of a row at most; padding ends where the model's positions do."""
    lengths = (config.data.max_length, known.length, spec.max_positions)
    return min(length for length in lengths if length is not None)


def _asked_activations(config: TrainConfig, spec: ModelSpec) -> Activations:
    """What was asked; nothing is kept where the choice is ours."""
    asked = config.pipeline.activations
    num_layers = len(spec.decoder_layers)
    if isinstance(asked, KeepLayers):
        return Activations(min(asked.keep_layers, num_layers), asked.offload)
    return Activations(num_layers if asked == "keep" else 0, False)
