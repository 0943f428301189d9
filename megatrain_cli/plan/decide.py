"""Turn what was asked into what will be done: every `auto` becomes a value here, nowhere else."""

import math
from dataclasses import dataclass

from megatrain_cli.config.schema import KeepLayers, TrainConfig
from megatrain_cli.model.layout import LayerLayout
from megatrain_cli.model.spec import ModelSpec
from megatrain_cli.plan.machine import MachineSpec
from megatrain_cli.plan.tiles import ComputeDtype, TileFormat
from megatrain_cli.units import MIB

# FP32 logits of one chunk of the head. Their size is chunk x vocabulary, and a few copies of them
# are alive at once, so this bounds the head whatever the length and the vocabulary.
HEAD_CHUNK_BYTES = 512 * MIB


@dataclass(frozen=True)
class Decisions:
    """All that shapes memory and order of a run.

    Attributes:
        pin_store: Tiles' weights and gradients are page-locked in place; otherwise the store is
            ordinary memory.
        num_slabs: 0 where gradients land straight in their tiles.
        slab_numel: Elements of a slab: the largest decoder layer's run.
        slot_numel: Elements of a device slot: the largest run, with the embedding's beside the
            head's when they are tied.
        keep_layers: How many decoder layers, the last ones, keep their activations.
        micro_batch_size: Rows that pass through a layer at once; 1 on the CPU, whatever was asked.
        head_chunk: Positions per chunk of the head.
        deterministic: Kernels on the device must repeat bit for bit; those of a CPU do anyway.
    """

    dtype: ComputeDtype
    attention: str
    tile_format: TileFormat
    eager: bool
    pin_store: bool
    num_slots: int
    slot_numel: int
    num_slabs: int
    slab_numel: int
    micro_batch_size: int
    num_micro_batches: int
    max_length: int
    keep_layers: int
    offload: bool
    head_chunk: int
    threads: int
    deterministic: bool


def decide(
    config: TrainConfig,
    spec: ModelSpec,
    layouts: tuple[LayerLayout, ...],
    machine: MachineSpec,
    *,
    can_pin: bool = True,
) -> Decisions:
    """Resolve every `auto`.

    Args:
        config: What was asked.
        spec: The model.
        layouts: Of all layers, in order.
        machine: What there is.
        can_pin: False after the driver refused to page-lock the store.
    """
    eager = config.optimizer.update == "eager"
    pin = machine.has_cuda and config.store.memory != "pageable" and can_pin
    accumulation = config.train.gradient_accumulation_steps
    rows = config.train.micro_batch_size
    if not machine.has_cuda:
        # A CPU gains nothing from a rectangle of rows, and pays for its padding.
        rows, accumulation = 1, rows * accumulation
    # With page-locked tiles and deferred updates nothing would be gained by a stop on the way.
    direct = pin and not eager
    slabs = config.pipeline.grad_slabs
    asked = config.train.gradient_accumulation_steps
    num_slabs = max(2, math.ceil(1.5 * asked)) if slabs == "auto" else slabs
    keep, offload = _activations(config, spec)
    body = spec.decoder_layers
    slab_numel = max(layout.numel for layout in layouts[1 : len(body) + 1])
    head_numel = layouts[-1].numel + (layouts[0].numel if spec.tied else 0)
    chunk = HEAD_CHUNK_BYTES // (4 * spec.vocab_size)
    # One core stays free for the thread that feeds the GPU.
    spare = 1 if machine.has_cuda else 0
    threads = config.optimizer.threads
    return Decisions(
        dtype=config.model.dtype,
        attention="sdpa" if config.model.attention == "auto" else config.model.attention,
        tile_format=TileFormat(config.model.dtype, config.optimizer.master, not eager),
        eager=eager,
        pin_store=pin,
        num_slots=config.pipeline.staging_buffers,
        slot_numel=max(head_numel, *(layout.numel for layout in layouts)),
        num_slabs=0 if direct else num_slabs,
        slab_numel=slab_numel,
        micro_batch_size=rows,
        num_micro_batches=accumulation,
        max_length=config.data.max_length,
        keep_layers=keep,
        offload=offload,
        head_chunk=max(64, chunk // 64 * 64),
        threads=max(1, machine.num_cores - spare) if threads == "auto" else threads,
        deterministic=machine.has_cuda and config.train.deterministic,
    )


def _activations(config: TrainConfig, spec: ModelSpec) -> tuple[int, bool]:
    asked = config.pipeline.activations
    num_layers = len(spec.decoder_layers)
    if isinstance(asked, KeepLayers):
        return min(asked.keep_layers, num_layers), asked.offload
    return (num_layers if asked == "keep" else 0), False
