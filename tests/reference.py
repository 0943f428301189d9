"""The oracle: the same training in plain autograd, one whole model in memory.

Hugging Face's own forward, `torch.optim.AdamW`, `clip_grad_norm_`: nothing of this program.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Row = tuple[Tensor, Tensor]
"""Token ids and labels of one row without padding, `(T,)` int64; -100 is not supervised."""


@dataclass(frozen=True)
class ReferenceStep:
    """What one optimizer step saw; norm and gradients are those before clipping."""

    loss: float
    norm: float
    gradients: dict[str, Tensor]


class ReferenceTrainer:
    """Trains `model` in place, in FP32; weight decay is for matrices alone."""

    def __init__(
        self,
        model: nn.Module,
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        max_grad_norm: float,
    ) -> None:
        self._model, self._max_norm = model, max_grad_norm
        self._params = dict(model.named_parameters())
        matrices = [p for p in self._params.values() if p.ndim > 1]
        others = [p for p in self._params.values() if p.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self._adam = torch.optim.AdamW(groups, betas=betas, eps=eps, foreach=False)

    def step(self, rows: Sequence[Row], rate: float) -> ReferenceStep:
        """One optimizer step: the loss is the mean over all supervised tokens of all rows."""
        self._adam.zero_grad()
        num_targets = sum(int((labels[1:] != -100).sum()) for _, labels in rows)
        total = 0.0
        for input_ids, labels in rows:
            logits = self._model(input_ids=input_ids[None]).logits[0, :-1]
            loss = F.cross_entropy(logits, labels[1:], ignore_index=-100, reduction="sum")
            (loss / num_targets).backward()
            total += loss.item() / num_targets
        gradients = {n: p.grad.clone() for n, p in self._params.items() if p.grad is not None}
        norm = nn.utils.clip_grad_norm_(self._params.values(), self._max_norm, foreach=False)
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()
        return ReferenceStep(total, norm.item(), gradients)

    def weights(self) -> dict[str, Tensor]:
        """All parameters; a tied one once."""
        return {name: p.detach() for name, p in self._params.items()}

    def moments(self, which: str) -> dict[str, Tensor]:
        """Adam's `exp_avg` or `exp_avg_sq`, by parameter."""
        return {name: self._adam.state[p][which] for name, p in self._params.items()}

    def set_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace all parameters; the moments stay."""
        with torch.no_grad():
            for name, param in self._params.items():
                param.copy_(weights[name])
