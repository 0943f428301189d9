"""How fast page-locked memory and the GPU exchange bytes, by the size of a copy."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from megatrain_cli.measure.memory import arrays
from megatrain_cli.measure.stopwatch import Stopwatch
from megatrain_cli.plan.rates import LinkRate
from megatrain_cli.units import MIB

# Small copies are issued in a row until so many bytes are under way: one alone would measure the
# time to issue it, which a run hides behind the copy before.
_IN_A_ROW = 64 * MIB


@dataclass(frozen=True)
class _Copy:
    stream: torch.cuda.Stream
    target: torch.Tensor
    source: torch.Tensor

    def issue(self) -> None:
        with torch.cuda.stream(self.stream):
            self.target.copy_(self.source, non_blocking=True)


def measure_link(
    device: torch.device, sizes: tuple[int, ...], stopwatch: Stopwatch, budget: float
) -> tuple[LinkRate, ...]:
    """Copies each way, and both at once, for each size.

    Args:
        device: The current CUDA device.
        sizes: Bytes of a copy, growing.
        stopwatch: Repeats.
        budget: Seconds for all.

    Raises:
        DeviceError: The driver refused to page-lock.
    """
    with arrays(2 * sizes[-1], pin=True) as (_, pinned):
        there, back = torch.cuda.Stream(device), torch.cuda.Stream(device)
        to, fro = (torch.ones(sizes[-1], dtype=torch.uint8, device=device) for _ in range(2))
        torch.cuda.current_stream(device).synchronize()  # the ones are written on this stream
        rates = []
        share = budget / (3 * len(sizes))
        for size in sizes:
            inward = _Copy(there, to[:size], pinned[:size])
            outward = _Copy(back, pinned[sizes[-1] : sizes[-1] + size], fro[:size])
            seconds = [
                stopwatch.median(partial(_seconds, copies, max(1, _IN_A_ROW // size)), share)
                for copies in ([inward], [outward], [inward, outward])
            ]
            rates.append(LinkRate(size, *(size / one for one in seconds)))
        return tuple(rates)


def _seconds(copies: Sequence[_Copy], times: int) -> float:
    """Seconds that one round of the copies takes, each on its own stream, all at once."""
    begin = torch.cuda.Event(enable_timing=True)
    begin.record(copies[0].stream)
    for copy in copies[1:]:
        copy.stream.wait_event(begin)
    for _ in range(times):
        for copy in copies:
            copy.issue()
    ends = [torch.cuda.Event(enable_timing=True) for _ in copies]
    for end, copy in zip(ends, copies, strict=True):
        end.record(copy.stream)
    for end in ends:
        end.synchronize()
    milliseconds: float = max(begin.elapsed_time(end) for end in ends)
    return milliseconds / 1e3 / times
