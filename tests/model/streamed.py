"""A whole forward and backward by streaming, in the simplest way: every layer recomputed."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from megatrain_cli.model.attention import PackedRows, find_documents
from megatrain_cli.model.discover import discover
from megatrain_cli.model.layout import LayerLayout
from megatrain_cli.model.loss import chunked_loss, head_loss, supervised_positions
from megatrain_cli.model.skeleton import Skeleton
from megatrain_cli.model.template import Head, LayerTemplate, Prologue

LAYERS = 4


def save_and_open(
    model: PreTrainedModel, folder: Path, dtype: torch.dtype, attention: str
) -> PreTrainedModel:
    """The reference, opened as users open it: buffers stay in FP32, whatever the dtype."""
    model.save_pretrained(folder)
    opened: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=attention
    )
    opened.eval()
    return opened


def make_run(layout: LayerLayout, model: PreTrainedModel, dtype: torch.dtype) -> Tensor:
    """A flat run `(numel,)` filled from a model's parameters; NaN in the gaps."""
    weights = model.state_dict()
    run = torch.full((layout.numel,), float("nan"), dtype=dtype)
    for entry in layout.entries:
        run[entry.offset : entry.end] = weights[entry.param.name].flatten()
    return run


def pack(documents: NDArray[np.integer] | None) -> PackedRows | None:
    """Document numbers `(B, T)` as a prologue takes them."""
    if documents is None:
        return None
    positions, starts = find_documents(documents)
    return PackedRows(torch.from_numpy(positions), torch.from_numpy(starts))


@dataclass
class Streamed:
    skeleton: Skeleton
    runs: list[Tensor]

    @classmethod
    def open(
        cls, model: PreTrainedModel, folder: Path, dtype: torch.dtype, attention: str
    ) -> "Streamed":
        skeleton = discover(folder, dtype=dtype, attention=attention)
        return cls(skeleton, [make_run(layout, model, dtype) for layout in skeleton.layouts])

    def logits(self, input_ids: Tensor, documents: NDArray[np.integer] | None = None) -> Tensor:
        """`(B, T, V)`."""
        prologue, head = Prologue(self.skeleton), Head(self.skeleton)
        hidden, args = prologue(prologue.leaves(self.runs[0]), input_ids, pack(documents))
        for index, call in enumerate(args):
            template = LayerTemplate(self.skeleton, index)
            hidden = template(template.leaves(self.runs[index + 1]), hidden, call)
        logits = head(
            head.leaves(self.runs[-1]), head.tied_leaves(self.runs[0]), hidden.flatten(0, 1)
        )
        return logits.view(*input_ids.shape, -1)

    def loss_and_gradients(
        self,
        input_ids: Tensor,
        labels: Tensor,
        chunk: int,
        seed: int | None = None,
        documents: NDArray[np.integer] | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean loss and the gradient of every parameter, nothing but layer inputs kept.

        With `seed`, the random state is set before each call of a layer, and before its recompute.
        """
        gradients: dict[str, Tensor] = {}

        def keep(index: int, found: list[Tensor]) -> None:
            for entry, gradient in zip(self.skeleton.layouts[index].entries, found, strict=True):
                gradients[entry.param.name] = gradients.get(entry.param.name, 0) + gradient

        def reseed(index: int) -> None:
            if seed is not None:
                torch.manual_seed(seed + index)

        prologue, head = Prologue(self.skeleton), Head(self.skeleton)
        templates = [LayerTemplate(self.skeleton, i) for i in range(LAYERS)]
        embed = prologue.leaves(self.runs[0])
        reseed(0)
        first, args = prologue(embed, input_ids, pack(documents))
        inputs = [first.detach().requires_grad_()]
        for index, template in enumerate(templates):
            reseed(index + 1)
            with torch.no_grad():
                weights = template.leaves(self.runs[index + 1])
                hidden = template(weights, inputs[-1], args[index])
            inputs.append(hidden.requires_grad_())

        positions, targets = map(torch.from_numpy, supervised_positions(labels.numpy(), documents))
        leaves, tied = head.leaves(self.runs[-1]), head.tied_leaves(self.runs[0])
        sums = [torch.zeros(x.shape) for x in (*leaves, *tied)]
        loss_sum, gathered_gradient = chunked_loss(
            head_loss(head),
            leaves,
            tied,
            inputs[-1].detach().flatten(0, 1)[positions],
            targets,
            scale=1 / len(positions),
            chunk=chunk,
            sums=sums,
        )
        keep(-1, sums[: len(leaves)])
        gradients |= zip(self.skeleton.spec.tied, sums[len(leaves) :], strict=True)
        gradient = torch.zeros_like(inputs[-1]).flatten(0, 1)
        gradient[positions] = gathered_gradient
        gradient = gradient.view_as(first)
        for index in reversed(range(LAYERS)):
            weights = templates[index].leaves(self.runs[index + 1])
            reseed(index + 1)
            output = templates[index](weights, inputs[index], args[index])
            gradient, *found = torch.autograd.grad(output, (inputs[index], *weights), gradient)
            keep(index + 1, found)
        keep(0, list(torch.autograd.grad(first, embed, gradient)))
        return loss_sum / len(positions), gradients


def random_ids(batch: int, length: int, seed: int = 0) -> Tensor:
    drawn = np.random.default_rng(seed).integers(0, 256, (batch, length))
    return torch.from_numpy(drawn)
