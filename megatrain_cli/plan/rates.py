"""What a machine was measured to do: bytes, parameters and operations a second."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

from pydantic import AfterValidator, Field

# The annotations refuse what no measurement gives, where a file is read: sums, products and
# quotients of these stay finite.
Count = Annotated[int, Field(ge=0, le=2**62)]
Rate = Annotated[float, Field(ge=1, le=1e20, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Times = Annotated[float, Field(ge=1, le=1e6, allow_inf_nan=False)]

LAYER_WIDTH = 2048
"""Hidden size of the decoder layer that is measured on a GPU."""


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


def _by_size(points: tuple[LinkRate, ...]) -> tuple[LinkRate, ...]:
    if any(a.num_bytes >= b.num_bytes for a, b in pairwise(points)):
        raise ValueError("points must come by growing size")
    return points


def _by_threads(points: tuple[ThreadRate, ...]) -> tuple[ThreadRate, ...]:
    if any(a.threads >= b.threads for a, b in pairwise(points)):
        raise ValueError("points must come by growing number of threads")
    return points


LinkRates = Annotated[tuple[LinkRate, ...], Field(min_length=1), AfterValidator(_by_size)]
ThreadRates = Annotated[tuple[ThreadRate, ...], Field(min_length=1), AfterValidator(_by_threads)]


@dataclass(frozen=True)
class IssueCost:
    """Seconds in which a thread issues a decoder layer to the GPU, however little is computed."""

    forward: Seconds
    backward: Seconds


@dataclass(frozen=True)
class ComputeRates:
    """Operations a second of the GPU in BF16.

    Attributes:
        matmul: One large square product, as multiplications and additions.
        layer: A decoder layer, forward and backward, as 6 x parameters x tokens.
        compiled_layer: The same with `torch.compile`; None where that failed.
        issue, compiled_issue: What issuing each takes; None where it was not measured.
    """

    matmul: Rate
    layer: Rate
    compiled_layer: Rate | None
    issue: IssueCost | None = None
    compiled_issue: IssueCost | None = None

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

SHORT_ROW, LONG_ROW = 67, 509
"""Tokens of the rows that they are measured with: odd, as products in BF16 that sum over an even
multiple of 16 tokens are up to 15 % faster and few rows have such a length."""


@dataclass(frozen=True)
class CpuCost:
    """What a parameter of a layer takes in forward and backward together, in seconds.

    Attributes:
        row: For each row, however short: the weight is read twice and its gradient written.
        token: For each token.
    """

    row: float
    token: float


@dataclass(frozen=True)
class CpuSums:
    """Parameters a second whose gradients are summed, by all cores.

    Attributes:
        first: Written over an FP32 sum.
        more: Added to it.
        finish: Rounded to the compute dtype, and their norm.
    """

    first: Rate
    more: Rate
    finish: Rate


@dataclass(frozen=True)
class CpuLayer:
    """Operations a second of all cores in a decoder layer, forward and backward, eager.

    Counted as 6 x parameters x tokens, in memory that was touched before; widths and rows are the
    constants above.

    Attributes:
        new_product: Seconds that the first row of a length takes more for each shape of weights
            that it meets, when kernels are made for it.
        logits: Logits a second, from the head's output to its gradient.
        sums: Of gradients.
    """

    narrow_short: Rate
    narrow_long: Rate
    wide_short: Rate
    wide_long: Rate
    new_product: Seconds
    logits: Rate
    sums: CpuSums

    def cost(self, hidden_size: int) -> CpuCost:
        """Of a layer of another width.

        A part of each cost stays and one falls as the width grows: products take its square and all
        else follows the width.
        """
        narrow = _cost(self.narrow_short, self.narrow_long)
        wide = _cost(self.wide_short, self.wide_long)

        def at(narrow: float, wide: float) -> float:
            slope = (narrow - wide) / (1 / NARROW_WIDTH - 1 / WIDE_WIDTH)
            # Two measurements that scatter must not give an operation that takes no time.
            return max(wide + slope * (1 / hidden_size - 1 / WIDE_WIDTH), min(narrow, wide) / 2)

        return CpuCost(at(narrow.row, wide.row), at(narrow.token, wide.token))


def _cost(short: float, long: float) -> CpuCost:
    """From the rates at two lengths; a row costs nothing itself where it seems to cost less."""
    seconds_short, seconds_long = 6 * SHORT_ROW / short, 6 * LONG_ROW / long
    token = (seconds_long - seconds_short) / (LONG_ROW - SHORT_ROW)
    token = min(max(token, seconds_long / LONG_ROW / 2), seconds_long / LONG_ROW)
    return CpuCost(seconds_long - LONG_ROW * token, token)


@dataclass(frozen=True)
class CpuRates:
    """Of all cores, by compute dtype.

    Attributes:
        fresh: Bytes a second of a large block that the system has just mapped: it hands out and
            clears each page when it is first touched, which can take longer than the work itself.
    """

    float32: CpuLayer
    bfloat16: CpuLayer
    fresh: Rate

    def of(self, dtype: str) -> CpuLayer:
        """Of a compute dtype."""
        return self.bfloat16 if dtype == "bfloat16" else self.float32


@dataclass(frozen=True)
class DiskRates:
    """Large files as those of a checkpoint, by as many threads, in bytes a second.

    Attributes:
        direct: Whether `O_DIRECT` passed the page cache by. Otherwise writes end with a sync, and
            reads come after the cache was asked to forget the file.
    """

    write: Rate
    read: Rate
    direct: bool


@dataclass(frozen=True)
class IssueTimes:
    """How many times as long issuing a layer takes while other threads of the host work."""

    forward: Times
    backward: Times


@dataclass(frozen=True)
class Beside:
    """What is done beside other threads of the host that work, as many as `auto` makes of each.

    Attributes:
        copy_to_pinned: Ordinary memory to page-locked memory by the threads that pack for the link,
            beside the optimizer; bytes copied a second.
        optimizer: Issuing beside the optimizer.
        copies: Issuing beside the threads that pack weights and take gradients in.
    """

    copy_to_pinned: Rate
    optimizer: IssueTimes
    copies: IssueTimes


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
        beside: Where there is a GPU.
    """

    link: LinkRates | None
    copy: ThreadRates
    copy_to_pinned: ThreadRates | None
    read: ThreadRates
    adam: ThreadRates
    lockable_bytes: Count | None
    lockable_refused: bool
    compute: ComputeRates | None
    disk: DiskRates | None
    cpu: CpuRates | None = None
    beside: Beside | None = None

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
