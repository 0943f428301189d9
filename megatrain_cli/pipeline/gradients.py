"""From autograd's gradients to one flat run a layer, ready to leave the device.

[Note: Gradient precision]
The gradient of a layer is summed over the micro-batches in FP32 and rounded to the compute dtype
once, when it is complete. Its squared norm is taken of the rounded values: of what is transferred
and what the optimizer will see.
"""

from collections.abc import Sequence

import torch

from megatrain_cli.model.layout import LayerLayout
from megatrain_cli.model.summing import add_in_place, row_norms

# Elements whose norm is taken in FP32 before FP64 takes over: few enough for the FP32 error to stay
# at one rounding, many enough for the FP64 part to cost nothing on devices with slow FP64.
NORM_ROW = 1024


def views(flat: torch.Tensor, layout: LayerLayout) -> list[torch.Tensor]:
    """Each parameter's part of a run, in layout order, shaped like the parameter."""
    return [flat[e.offset : e.end].view(e.param.shape) for e in layout.entries]


def squared_norm(flat: torch.Tensor) -> torch.Tensor:
    """Sum of squares of a run in FP64, a scalar on its device."""
    whole = flat.numel() // NORM_ROW * NORM_ROW
    total = torch.zeros((), dtype=torch.float64, device=flat.device)
    for part in (flat[:whole].view(-1, NORM_ROW), flat[whole:].view(1, -1)):
        if part.numel():
            total += row_norms(part).double().square_().sum()
    return total


class GradientCollector:
    """Sums one layer's gradients over micro-batches and writes the flat run of the result.

    Args:
        layouts: Of all layers, in order.
        tied: Places in the embedding's layout of the parameters that the head uses too.
        num_micro_batches: With one, gradients need no FP32 sum, unless they come in chunks.
    """

    def __init__(
        self,
        layouts: Sequence[LayerLayout],
        tied: Sequence[int],
        num_micro_batches: int,
        device: torch.device,
    ) -> None:
        self._layouts = layouts
        self._single = num_micro_batches == 1
        # The head's gradient arrives chunk by chunk, and a tied weight's part of it has to wait
        # for the embedding's: those sums live beside the one that the other layers share.
        self.head_sums = _sums(layouts[-1], range(len(layouts[-1].entries)), device)
        self.tied_sums = _sums(layouts[0], tied, device)
        self._tied = dict(zip(tied, self.tied_sums, strict=True))
        numel = 0 if self._single else max(layout.numel for layout in layouts[:-1])
        self._sum = torch.zeros(numel, dtype=torch.float32, device=device)

    def start_head(self) -> None:
        """Before the first micro-batch's loss."""
        torch._foreach_zero_([*self.head_sums, *self.tied_sums])

    def add(self, layer: int, gradients: Sequence[torch.Tensor | None], *, first: bool) -> None:
        """Add one micro-batch's gradients of a layer, in layout order; None counts as zero.

        The first are written over what the sum held: half the memory traffic of zeros and a sum.
        """
        if self._single:
            return
        found = list(zip(views(self._sum, self._layouts[layer]), gradients, strict=True))
        targets = [target for target, gradient in found if gradient is not None]
        parts = [gradient for _, gradient in found if gradient is not None]
        absent = [target for target, gradient in found if gradient is None]
        if first and absent:
            torch._foreach_zero_(absent)
        if targets:
            if first:
                torch._foreach_copy_(targets, parts)
            elif self._sum.is_cuda:
                torch._foreach_add_(targets, parts)
            else:
                for target, part in zip(targets, parts, strict=True):
                    add_in_place(target, part)

    def finish(
        self, layer: int, gradients: Sequence[torch.Tensor | None], out: torch.Tensor
    ) -> torch.Tensor:
        """Round the complete gradient into `out` (`(numel,)`, compute dtype); its squared norm.

        Args:
            layer: Which layer.
            gradients: Of its last micro-batch, already added.
            out: The device buffer that will leave for the host.
        """
        layout = self._layouts[layer]
        for start, end in layout.gaps:
            out[start:end].zero_()  # holds another layer's gradient
        if layer == len(self._layouts) - 1:
            complete: Sequence[torch.Tensor | None] = self.head_sums
        elif self._single:
            complete = gradients
        else:
            complete = views(self._sum, layout)
        if layer == 0 and self._tied:
            for i, part in enumerate(complete):
                if i in self._tied and part is not None:
                    add_in_place(self._tied[i], part)
            complete = [self._tied.get(i, part) for i, part in enumerate(complete)]
        for target, part in zip(views(out, layout), complete, strict=True):
            if part is None:
                target.zero_()
            else:
                target.copy_(part)
        return squared_norm(out)


def _sums(layout: LayerLayout, which: Sequence[int], device: torch.device) -> list[torch.Tensor]:
    entries = [layout.entries[i] for i in which]
    return [torch.zeros(e.param.shape, dtype=torch.float32, device=device) for e in entries]
