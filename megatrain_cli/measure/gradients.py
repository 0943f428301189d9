"""What the CPU does with gradients and logits, and how fast memory is that nobody touched yet."""

import mmap
from collections.abc import Callable
from functools import partial

import torch

from megatrain_cli.measure.stopwatch import Stopwatch
from megatrain_cli.model.layout import make_layout
from megatrain_cli.model.loss import head_loss
from megatrain_cli.model.spec import LayerSpec, ParamSpec
from megatrain_cli.pipeline.gradients import GradientCollector
from megatrain_cli.plan.rates import CpuSums

_WIDTH = 1024
_POSITIONS = 64


def measure_sums(numel: int, dtype: torch.dtype, stopwatch: Stopwatch, budget: float) -> CpuSums:
    """Parameters a second of a run's own sums, roundings and norms.

    Args:
        numel: Parameters of the layer.
        dtype: Of its gradients.
        stopwatch: What measures.
        budget: Seconds for all of it.
    """
    shape = (max(numel // _WIDTH, 1), _WIDTH)
    layer, head = (
        make_layout(LayerSpec(name, "", (ParamSpec(name, size),)))
        for name, size in (("layer", shape), ("head", (1,)))
    )
    collector = GradientCollector((layer, head), (), 2, torch.device("cpu"))
    gradient = (1e-3 * torch.randn(_WIDTH)).to(dtype).expand(shape).contiguous()
    out = torch.zeros(layer.numel, dtype=dtype)

    def rate(work: Callable[[], object]) -> float:
        once = partial(stopwatch.seconds_of, work)
        return gradient.numel() / stopwatch.median(once, budget / 3)

    return CpuSums(
        first=rate(lambda: collector.add(0, [gradient], first=True)),
        more=rate(lambda: collector.add(0, [gradient], first=False)),
        finish=rate(lambda: collector.finish(0, [gradient], out)),
    )


def measure_logits(vocab: int, dtype: torch.dtype, stopwatch: Stopwatch, budget: float) -> float:
    """Logits a second, from the output of a head's product to that output's gradient.

    Args:
        vocab: Logits of a position.
        dtype: Of the product.
        stopwatch: What measures.
        budget: Seconds.
    """
    loss = head_loss(lambda head, tied, hidden: hidden)
    logits = torch.randn(_POSITIONS, vocab).to(dtype).requires_grad_()
    targets = torch.arange(_POSITIONS) % vocab

    def once() -> None:
        torch.autograd.grad(loss((), (), logits, targets), logits)

    return logits.numel() / stopwatch.median(partial(stopwatch.seconds_of, once), budget)


def measure_fresh(num_bytes: int, stopwatch: Stopwatch, budget: float) -> float:
    """Bytes a second that are written to memory which was just mapped for it, and given back.

    Args:
        num_bytes: Of a block.
        stopwatch: What measures.
        budget: Seconds.
    """

    def once() -> None:
        # Not by malloc, which maps only what it has no free block for.
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        torch.frombuffer(memory, dtype=torch.uint8).fill_(1)

    return num_bytes / stopwatch.median(partial(stopwatch.seconds_of, once), budget)
