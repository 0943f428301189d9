"""Loss and head gradients in chunks, over supervised positions only.

Memory never grows with length x vocabulary: the logits of one chunk exist at a time, and its
backward is done at once.

B batch, T tokens, D width, V vocabulary, N flat positions.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from megatrain_cli.model.summing import add_in_place

IGNORED = -100

# (leaves_head, leaves_tied, hidden (N, D), targets (N,)) -> summed loss of the N positions, FP32.
ChunkLoss = Callable[[Sequence[Tensor], Sequence[Tensor], Tensor, Tensor], Tensor]

# `Head.__call__`: (leaves_head, leaves_tied, hidden (N, D)) -> logits (N, V).
HeadFunction = Callable[[Sequence[Tensor], Sequence[Tensor], Tensor], Tensor]


def head_loss(head: HeadFunction) -> ChunkLoss:
    """Head and cross entropy as one function; targets of -100 count nothing."""

    def loss(
        leaves_head: Sequence[Tensor],
        leaves_tied: Sequence[Tensor],
        hidden: Tensor,
        targets: Tensor,
    ) -> Tensor:
        logits = head(leaves_head, leaves_tied, hidden)
        return F.cross_entropy(logits.float(), targets, reduction="sum", ignore_index=IGNORED)

    return loss


def supervised_positions(
    labels: NDArray[np.integer], documents: NDArray[np.integer] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where the model is trained, and what it must say there.

    The one place of the program that shifts: the hidden state at position p predicts the label at
    p + 1 of the same document.

    Args:
        labels: `(B, T)`, aligned with the input ids; -100 is not supervised.
        documents: `(B, T)`, the number of each token's document; None is one document a row.

    Returns:
        Positions in the flattened `(B * T,)`, ascending, and the target of each; both `(N,)`.
    """
    num_tokens = labels.shape[1]
    supervised = labels[:, 1:] != IGNORED
    if documents is not None:
        supervised &= documents[:, 1:] == documents[:, :-1]
    rows, columns = np.nonzero(supervised)
    positions = (rows * num_tokens + columns).astype(np.int64)
    return positions, labels[rows, columns + 1].astype(np.int64)


@dataclass(frozen=True)
class WholeChunks:
    """Head and loss compiled for chunks of exactly `size` positions."""

    loss: ChunkLoss
    size: int


def chunked_loss(
    loss: ChunkLoss,
    leaves_head: Sequence[Tensor],
    leaves_tied: Sequence[Tensor],
    hidden: Tensor,
    targets: Tensor,
    *,
    scale: float,
    chunk: int,
    sums: Sequence[Tensor],
    whole: WholeChunks | None = None,
) -> tuple[Tensor, Tensor]:
    """Cross entropy over supervised positions, with its backward through the head.

    Does not wait for the device and keeps nothing between chunks.

    Args:
        loss: As `head_loss` makes it, for any number of positions.
        leaves_head: Weights that the head owns.
        leaves_tied: Weights that it shares with `embed`.
        hidden: `(N, D)`, gathered at the supervised positions; N may be 0.
        targets: `(N,)` int64, already aligned with `hidden`.
        scale: What a token's loss weighs in the gradient: 1 / supervised tokens of the whole
            optimizer step.
        chunk: Positions that `loss` is given at once.
        sums: FP32, one for each of `leaves_head` and then of `leaves_tied`, of its shape. The
            scaled gradients are added into them.
        whole: Takes as many positions as it can; a rest of half its size or more is filled up with
            positions that count nothing, which costs less than computing it by `loss`.

    Returns:
        The sum of the tokens' losses, FP32 `()`, not scaled; and the scaled gradient of `hidden`,
        `(N, D)` in its dtype.
    """
    leaves = (*leaves_head, *leaves_tied)
    loss_sum = torch.zeros((), dtype=torch.float32, device=hidden.device)
    hidden_gradient = torch.empty_like(hidden)
    weight = torch.full((), scale, dtype=torch.float32, device=hidden.device)

    def one_chunk(function: ChunkLoss, start: int, end: int, size: int) -> None:
        # A function, so that its logits and weight gradients are gone before the next ones come.
        inputs, wanted = hidden[start:end], targets[start:end]
        if end - start < size:
            inputs = F.pad(inputs, (0, 0, 0, size - (end - start)))
            wanted = F.pad(wanted, (0, size - (end - start)), value=IGNORED)
        # A leaf of its own, so that backward ends here and returns this chunk's gradient.
        inputs = inputs.detach().requires_grad_()
        with torch.enable_grad():
            summed = function(leaves_head, leaves_tied, inputs, wanted)
        gradients = torch.autograd.grad(summed, (inputs, *leaves), grad_outputs=weight)
        hidden_gradient[start:end] = gradients[0][: end - start]
        # In FP32: many chunks summed in BF16 would lose the small ones.
        for total, gradient in zip(sums, gradients[1:], strict=True):
            add_in_place(total, gradient)
        loss_sum.add_(summed.detach())

    for start, end, size in cut_positions(hidden.shape[0], chunk, whole.size if whole else None):
        function = whole.loss if whole and size == whole.size else loss
        one_chunk(function, start, end, size)
    return loss_sum, hidden_gradient


def summed_loss(
    loss: ChunkLoss,
    leaves_head: Sequence[Tensor],
    leaves_tied: Sequence[Tensor],
    hidden: Tensor,
    targets: Tensor,
    *,
    chunk: int,
) -> Tensor:
    """Cross entropy as `chunked_loss` sums it, without any gradient; the arguments are its.

    Returns:
        The sum of the tokens' losses, FP64 `()`.
    """
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)
    with torch.no_grad():
        for start, end, _ in cut_positions(hidden.shape[0], chunk, None):
            total += loss(leaves_head, leaves_tied, hidden[start:end], targets[start:end])
    return total


def cut_positions(count: int, chunk: int, whole: int | None) -> Iterator[tuple[int, int, int]]:
    """Cut `count` positions into `(start, end, size computed)`.

    Chunks of `whole` first; what is left of them when half of one or more, as one that is filled
    up; the rest in pieces of up to `chunk`, computed at their own size.
    """
    start = 0
    while whole and count - start >= (whole + 1) // 2:
        end = min(start + whole, count)
        yield start, end, whole
        start = end
    for first in range(start, count, chunk):
        end = min(first + chunk, count)
        yield first, end, end - first
