"""The two computations that fill a step, compiled once for all layers of a kind, or eager.

`torch.compile` sees static shapes only: rows of one length, and a fixed number of positions for the
head. Everything is compiled before the first step (`pipeline.rehearsal`), and from then on a
recompile, which costs as much as many steps, is an error and not a surprise.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain_cli.model.loss import ChunkLoss, WholeChunks, head_loss
from megatrain_cli.model.recorder import LayerArgs
from megatrain_cli.model.template import Head, LayerTemplate

# (template, leaves, hidden (B, T, D), args) -> hidden (B, T, D)
LayerFunction = Callable[[LayerTemplate, Sequence[Tensor], Tensor, LayerArgs], Tensor]

# Compiled forms of one function that torch keeps. Each layer kind takes one with and one without a
# graph; past torch's own limit of 8 a function would silently run eager.
_FORMS = 256


def run_layer(
    template: LayerTemplate, leaves: Sequence[Tensor], hidden: Tensor, args: LayerArgs
) -> Tensor:
    """One decoder layer: hidden state `(B, T, D)` in, hidden state `(B, T, D)` out."""
    return template(leaves, hidden, args)


@dataclass(frozen=True)
class Functions:
    """What `pipeline.compute` calls.

    Attributes:
        layer: `run_layer`, eager or compiled.
        chunk_loss: Head and loss of any number of positions, eager.
        whole_chunk_loss: The same, compiled for chunks of one size; None where nothing is compiled.
    """

    layer: LayerFunction
    chunk_loss: ChunkLoss
    whole_chunk_loss: ChunkLoss | None = None

    @property
    def compiled(self) -> bool:
        """Whether layers and whole chunks run compiled."""
        return self.whole_chunk_loss is not None

    def whole_chunks(self, size: int) -> WholeChunks | None:
        """The compiled head for chunks of `size` positions; None where nothing is compiled."""
        return WholeChunks(self.whole_chunk_loss, size) if self.whole_chunk_loss else None

    def no_recompile(self) -> AbstractContextManager[object]:
        """A context in which compiling anything raises `RuntimeError`."""
        if not self.compiled:
            return nullcontext()
        context: AbstractContextManager[object] = torch.compiler.set_stance("fail_on_recompile")
        return context


def eager_functions(head: Head) -> Functions:
    """Everything as the modules themselves compute it."""
    return Functions(run_layer, head_loss(head))


def compiled_functions(head: Head, backend: str | Callable[..., object] = "inductor") -> Functions:
    """The same computations, to be compiled at their first call.

    Args:
        head: Of the model.
        backend: As `torch.compile` takes it.
    """
    torch._dynamo.config.recompile_limit = _FORMS
    torch._dynamo.config.accumulated_recompile_limit = 4 * _FORMS
    loss = head_loss(head)
    return Functions(
        torch.compile(run_layer, backend=backend, dynamic=False, fullgraph=True),
        loss,
        torch.compile(loss, backend=backend, dynamic=False, fullgraph=True),
    )
