"""Loss and head gradients in chunks, over supervised positions only.

Memory never grows with length x vocabulary: the logits of one chunk exist at a time, and its
backward is done at once.

B batch, T tokens, D width, V vocabulary, N flat positions.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

IGNORED = -100

# `Head.__call__`, or the same compiled: (leaves_head, leaves_tied, hidden (N, D)) -> (N, V).
HeadFunction = Callable[[Sequence[Tensor], Sequence[Tensor], Tensor], Tensor]


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


def chunked_loss(
    head: HeadFunction,
    leaves_head: Sequence[Tensor],
    leaves_tied: Sequence[Tensor],
    hidden: Tensor,
    targets: Tensor,
    *,
    scale: float,
    chunk: int,
    sums: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """Cross entropy over supervised positions, with its backward through the head.

    Does not wait for the device and keeps nothing between chunks.

    Args:
        head: Makes logits.
        leaves_head: Weights that `head` owns.
        leaves_tied: Weights that it shares with `embed`.
        hidden: `(N, D)`, gathered at the supervised positions; N may be 0.
        targets: `(N,)` int64, already aligned with `hidden`.
        scale: What a token's loss weighs in the gradient: 1 / supervised tokens of the whole
            optimizer step.
        chunk: Positions computed at once.
        sums: FP32, one for each of `leaves_head` and then of `leaves_tied`, of its shape. The
            scaled gradients are added into them.

    Returns:
        The sum of the tokens' losses, FP32 `()`, not scaled; and the scaled gradient of `hidden`,
        `(N, D)` in its dtype.
    """
    leaves = (*leaves_head, *leaves_tied)
    loss_sum = torch.zeros((), dtype=torch.float32, device=hidden.device)
    hidden_gradient = torch.empty_like(hidden)
    weight = torch.full((), scale, dtype=torch.float32, device=hidden.device)

    def one_chunk(piece: slice) -> None:
        # A function, so that its logits and weight gradients are gone before the next ones come.
        # A leaf of its own, so that backward ends here and returns this chunk's gradient.
        inputs = hidden[piece].detach().requires_grad_()
        with torch.enable_grad():
            logits = head(leaves_head, leaves_tied, inputs)
            loss = F.cross_entropy(logits.float(), targets[piece], reduction="sum")
        gradients = torch.autograd.grad(loss, (inputs, *leaves), grad_outputs=weight)
        hidden_gradient[piece] = gradients[0]
        # In FP32: many chunks summed in BF16 would lose the small ones.
        for total, gradient in zip(sums, gradients[1:], strict=True):
            total.add_(gradient)
        loss_sum.add_(loss.detach())

    for start in range(0, hidden.shape[0], chunk):
        one_chunk(slice(start, start + chunk))
    return loss_sum, hidden_gradient
