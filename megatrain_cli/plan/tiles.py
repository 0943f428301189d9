"""What one layer's tile holds, region by region, in bytes: the arithmetic behind the store.

The store allocates exactly what these functions say, so a plan's bill for host RAM is a fact and
not an estimate.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from megatrain_cli.errors import InternalError
from megatrain_cli.model.layout import LayerLayout
from megatrain_cli.units import round_up

ComputeDtype = Literal["bfloat16", "float32"]
MasterMode = Literal["fp32_split", "bf16", "bf16_stochastic", "fp32"]

# Every region starts on a page of its own: page-locking and O_DIRECT writes work on whole pages.
PAGE_BYTES = 4096

# Bytes of one element.
DTYPE_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class TileFormat:
    """How a tile keeps its parameters.

    Attributes:
        compute_dtype: Of weights and gradients, as the device sees them.
        master: What the optimizer updates. `fp32_split` is an FP32 value kept as the nearest BF16
            (the weights) plus a 16-bit remainder; `bf16` and `bf16_stochastic` have no copy but
            the weights; `fp32` is a whole FP32 value, beside BF16 weights or, with
            `compute_dtype="float32"`, the weights themselves.
        keep_gradient: Whether the tile has room for its gradient. False when each layer is updated
            as soon as its gradient lands, straight from the slab.
    """

    compute_dtype: ComputeDtype
    master: MasterMode
    keep_gradient: bool

    def __post_init__(self) -> None:
        if self.compute_dtype == "float32" and self.master != "fp32":
            raise InternalError(f"float32 weights are their own master, not `{self.master}`.")


def region_widths(fmt: TileFormat) -> dict[str, int]:
    """Bytes of one element in each region of a tile, in tile order.

    `weights` and `gradient` come first and side by side, so that one page-locked range covers all
    that crosses the link.
    """
    width = DTYPE_BYTES[fmt.compute_dtype]
    widths = {"weights": width}
    if fmt.keep_gradient:
        widths["gradient"] = width
    if fmt.master == "fp32_split":
        widths["remainder"] = 2
    if fmt.master == "fp32" and fmt.compute_dtype == "bfloat16":
        widths["master"] = 4
    widths["exp_avg"] = 4
    widths["exp_avg_sq"] = 4
    return widths


def tile_regions(numel: int, fmt: TileFormat) -> dict[str, int]:
    """Bytes of each region of a tile of `numel` elements, in tile order, in whole pages."""
    widths = region_widths(fmt)
    return {name: round_up(numel * size, PAGE_BYTES) for name, size in widths.items()}


def slab_bytes(count: int, num_bytes: int) -> int:
    """Bytes of gradient slabs of `num_bytes` each, and an FP64 beside each, in whole pages."""
    return count * round_up(num_bytes, PAGE_BYTES) + round_up(8 * count, PAGE_BYTES)


def store_bytes(layouts: Iterable[LayerLayout], fmt: TileFormat) -> dict[str, int]:
    """Bytes of each region, summed over the layers; their sum is what the store allocates."""
    total: dict[str, int] = {}
    for layout in layouts:
        for name, num_bytes in tile_regions(layout.numel, fmt).items():
            total[name] = total.get(name, 0) + num_bytes
    return total
