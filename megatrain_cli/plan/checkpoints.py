"""What checkpoints take: bytes on disk, and the host memory that writing them needs."""

from collections.abc import Iterable, Mapping

from megatrain_cli.config.schema import CheckpointSection
from megatrain_cli.model.layout import LayerLayout
from megatrain_cli.model.spec import ModelSpec
from megatrain_cli.plan.tiles import PAGE_BYTES, TileFormat, region_widths, tile_regions
from megatrain_cli.units import MIB

IO_CHUNK_BYTES = 16 * MIB
"""Size of one aligned buffer that passes to the disk what cannot be written in place."""

IO_CHUNKS = 4
"""Such buffers that saving and resuming have at most."""

THREAD_BYTES = MIB
"""Stack and heap of a thread that saves; 0.6 MiB were measured."""

# Layers in the pool where its size is `auto`: one being written and one waiting for the disk.
_POOLED_LAYERS = 2


def durable_bytes(numel: int, fmt: TileFormat) -> int:
    """Bytes that `numel` parameters take on disk: all regions of a tile but the gradient."""
    return numel * _durable(region_widths(fmt))


def checkpoint_bytes(spec: ModelSpec, fmt: TileFormat) -> int:
    """Tensors of one checkpoint; headers, config and tokenizer come on top."""
    return durable_bytes(spec.num_parameters, fmt)


def largest_file_bytes(numels: Iterable[int], fmt: TileFormat) -> int:
    """Of the files of a checkpoint, the tensors of the largest one.

    A layer has a file of weights, and one of all else.

    Args:
        numels: Elements of each layer.
        fmt: Of their tiles.
    """
    widths = region_widths(fmt)
    return max(numels) * max(widths["weights"], _durable(widths) - widths["weights"])


def kept_checkpoints(checkpoint: CheckpointSection, last_step: int | None) -> int:
    """Most checkpoints that a run folder holds at once: the newest, milestones, one being written.

    Args:
        checkpoint: What was asked.
        last_step: Where the run ends; None if that is not known yet, and milestones are not
            counted.
    """
    every, milestones = checkpoint.keep_every_steps, 0
    if every is not None and last_step is not None:
        milestones = last_step // every
    return checkpoint.keep_last + milestones + 1


def pool_bytes(layouts: Iterable[LayerLayout], fmt: TileFormat) -> int:
    """Bytes of a bounce pool that has room for the two largest of these layers."""
    return sum(sorted(_copies(layouts, fmt))[-_POOLED_LAYERS:])


def most_pool_bytes(layouts: Iterable[LayerLayout], fmt: TileFormat) -> int:
    """Bytes of a bounce pool that has room for all of these layers: more would lie idle."""
    return sum(_copies(layouts, fmt))


def buffered_bytes(layouts: Iterable[LayerLayout], fmt: TileFormat) -> int:
    """What the threads that save pass through their buffers at once, at most a chunk each.

    A file has no gaps, and is written from where a layer lies as long as whole pages of both are
    one below the other: behind a run that is no whole number of pages, moments are copied.
    """
    widths = region_widths(fmt)
    optim = [size for name, size in widths.items() if name not in ("weights", "gradient")]
    found = []
    for layout in layouts:
        copied = max(_copied(layout, [widths["weights"]]), _copied(layout, optim))
        found.append(min(copied, IO_CHUNK_BYTES))
    return sum(sorted(found)[-IO_CHUNKS:])


def _copied(layout: LayerLayout, widths: Iterable[int]) -> int:
    """Of one file: bytes of the runs between gaps that lie elsewhere in their pages than there."""
    starts = [0, *(end for _, end in layout.gaps)]
    ends = [*(start for start, _ in layout.gaps), layout.numel]
    at = copied = 0
    for width in widths:
        for start, end in zip(starts, ends, strict=True):
            size = (end - start) * width
            if (at - start * width) % PAGE_BYTES:
                copied += size
            at += size
    return copied


def _copies(layouts: Iterable[LayerLayout], fmt: TileFormat) -> list[int]:
    return [_durable(tile_regions(layout.numel, fmt)) for layout in layouts]


def _durable(regions: Mapping[str, int]) -> int:
    return sum(size for name, size in regions.items() if name != "gradient")
