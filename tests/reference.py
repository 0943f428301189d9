"""The oracle: the same training in plain autograd, one whole model in memory.

Hugging Face's own forward, `torch.optim.AdamW`, `clip_grad_norm_`: nothing of this program.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Row = tuple[Tensor, Tensor]
"""Token ids and labels of one row without padding, `(T,)` int64; -100 is not supervised."""


@dataclass
class Reference:
    """What a run looked like; gradients of every step are those before clipping."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    exp_avg: dict[str, Tensor] = field(default_factory=dict)
    exp_avg_sq: dict[str, Tensor] = field(default_factory=dict)


def train_reference(
    model: nn.Module,
    steps: Sequence[Sequence[Row]],
    rates: Sequence[float],
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    max_grad_norm: float,
) -> Reference:
    """Train `model` in place, one optimizer step for each list of rows."""
    params = dict(model.named_parameters())
    groups = [
        {"params": [p for p in params.values() if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in params.values() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, betas=betas, eps=eps, foreach=False)
    found = Reference()
    for rows, rate in zip(steps, rates, strict=True):
        adam.zero_grad()
        num_targets = sum(int((labels[1:] != -100).sum()) for _, labels in rows)
        losses = [_loss(model, *row) / num_targets for row in rows]
        for loss in losses:
            loss.backward()
        found.losses.append(sum(loss.item() for loss in losses))
        found.gradients.append({n: p.grad.clone() for n, p in params.items() if p.grad is not None})
        norm = nn.utils.clip_grad_norm_(params.values(), max_grad_norm, foreach=False)
        found.norms.append(norm.item())
        for group in adam.param_groups:
            group["lr"] = rate
        adam.step()
    found.weights = {name: p.detach() for name, p in params.items()}
    found.exp_avg = {name: adam.state[p]["exp_avg"] for name, p in params.items()}
    found.exp_avg_sq = {name: adam.state[p]["exp_avg_sq"] for name, p in params.items()}
    return found


def _loss(model: nn.Module, input_ids: Tensor, labels: Tensor) -> Tensor:
    logits = model(input_ids=input_ids[None]).logits[0, :-1]
    return F.cross_entropy(logits, labels[1:], ignore_index=-100, reduction="sum")
