"""What a machine was measured to do: bytes, parameters and operations a second."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

# The annotations refuse what no measurement gives, where a file is read: sums, products and
# quotients of these stay finite.
Count = Annotated[int, Field(ge=0, le=2**62)]
LAYER_WIDTH = 2048
"""Hidden size of the decoder layer that is measured."""

Rate = Annotated[float, Field(ge=1, le=1e20, allow_inf_nan=False)]


@dataclass(frozen=True)
class LinkRate:
    """Copies of one size between page-locked memory and the GPU, in bytes a second.

    Attributes:
        num_bytes: Of one copy.
        both_ways: Each way, while both are in use.
    """

    num_bytes: Count
    to_device: Rate
    to_host: Rate
    both_ways: Rate


@dataclass(frozen=True)
class ThreadRate:
    """What some threads did together, a second."""

    threads: Annotated[int, Field(ge=1)]
    rate: Rate


@dataclass(frozen=True)
class ComputeRates:
    """Operations a second of the GPU in BF16.

    Attributes:
        matmul: One large square product, as multiplications and additions.
        layer: A decoder layer, forward and backward, as 6 x parameters x tokens.
        compiled_layer: The same with `torch.compile`; None where that failed.
    """

    matmul: Rate
    layer: Rate
    compiled_layer: Rate | None

    def of_layers(self, hidden_size: int, *, compiled: bool) -> float:
        """Operations a second of decoder layers of another width than the one measured.

        Products take `hidden_size^2` operations a token and all else of a layer moves `hidden_size`
        bytes, at the rate of device memory: so the time an operation takes beyond that of a product
        falls as layers grow wider.
        """
        measured = self.layer
        if compiled and self.compiled_layer is not None:
            measured = max(measured, self.compiled_layer)
        product = 1 / max(self.matmul, measured)
        return 1 / (product + (1 / measured - product) * LAYER_WIDTH / hidden_size)


NARROW_WIDTH, WIDE_WIDTH = 512, 2048
"""Hidden sizes of the decoder layers that are measured on the CPU."""


@dataclass(frozen=True)
class CpuRates:
    """Operations a second of all cores in a decoder layer, forward and backward, eager.

    Counted as 6 x parameters x tokens, of layers of `NARROW_WIDTH` and `WIDE_WIDTH`.
    """

    narrow_float32: Rate
    wide_float32: Rate
    narrow_bfloat16: Rate
    wide_bfloat16: Rate

    def of_layers(self, hidden_size: int, dtype: str) -> float:
        """Of another width; `dtype` is the compute dtype.

        The time an operation takes is a part that stays and one that falls as the width grows, as
        products take its square and all else follows the width.
        """
        narrow, wide = self.narrow_float32, self.wide_float32
        if dtype == "bfloat16":
            narrow, wide = self.narrow_bfloat16, self.wide_bfloat16
        slope = (1 / narrow - 1 / wide) / (1 / NARROW_WIDTH - 1 / WIDE_WIDTH)
        # Two measurements that scatter must not give an operation that takes no time.
        least = 1 / (2 * max(narrow, wide))
        return 1 / max(1 / wide + slope * (1 / hidden_size - 1 / WIDE_WIDTH), least)


@dataclass(frozen=True)
class DiskRates:
    """One large file, in bytes a second.

    Attributes:
        direct: Whether `O_DIRECT` passed the page cache by. Otherwise writes end with a sync, and
            reads come after the cache was asked to forget the file.
    """

    write: Rate
    read: Rate
    direct: bool


@dataclass(frozen=True)
class MachineRates:
    """All of it. None: there is no GPU for it, or the note in the file says why it is missing.

    Attributes:
        link: By growing size.
        copy: Ordinary memory to ordinary memory by threads; bytes copied, not touched.
        copy_to_pinned: Ordinary memory to page-locked memory by threads.
        read: Bytes read from RAM by threads.
        adam: Parameters updated by threads, with `fp32_split` masters and BF16 gradients.
        lockable_bytes: That were page-locked at once when it was tried.
        lockable_refused: Whether the driver refused more; otherwise more was not tried.
        compute: Of the GPU.
        cpu: Of a machine that computes on its cores; None where there is a GPU.
    """

    link: Annotated[tuple[LinkRate, ...], Field(min_length=1)] | None
    copy: Annotated[tuple[ThreadRate, ...], Field(min_length=1)]
    copy_to_pinned: Annotated[tuple[ThreadRate, ...], Field(min_length=1)] | None
    read: Annotated[tuple[ThreadRate, ...], Field(min_length=1)]
    adam: Annotated[tuple[ThreadRate, ...], Field(min_length=1)]
    lockable_bytes: Count | None
    lockable_refused: bool
    compute: ComputeRates | None
    disk: DiskRates | None
    cpu: CpuRates | None = None

    def burst_bytes(self, target_utilization: float) -> int | None:
        """The smallest copy to the device from which on all reach this share of the link's peak.

        None where the link was not measured.
        """
        if self.link is None:
            return None
        wanted = target_utilization * max(point.to_device for point in self.link)
        found = self.link[-1].num_bytes
        for point in reversed(self.link):
            if point.to_device < wanted:
                break
            found = point.num_bytes
        return found


def rate_at(points: Sequence[ThreadRate], threads: int) -> float:
    """The rate with `threads` threads: between two measured ones a line, beyond them the nearest.

    Args:
        points: At least one, by growing number of threads.
        threads: At least 1.
    """
    below = [point for point in points if point.threads <= threads]
    above = [point for point in points if point.threads >= threads]
    if not below or not above:
        return (below[-1] if below else above[0]).rate
    first, last = below[-1], above[0]
    if first.threads == last.threads:
        return first.rate
    share = (threads - first.threads) / (last.threads - first.threads)
    return first.rate + share * (last.rate - first.rate)
