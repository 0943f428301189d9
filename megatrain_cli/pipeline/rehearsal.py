"""One layer of each kind and the head, once forward and back, before the pipeline is built.

Compiles what a run computes, at the shapes it will have, and measures what that takes of the
device: how many layers can keep their activations is then known and not estimated.
"""

from collections.abc import Callable

import torch
from torch.autograd.graph import get_gradient_edge

from megatrain_cli.model.attention import halved_rows
from megatrain_cli.model.functions import Functions
from megatrain_cli.model.handles import saved_weights
from megatrain_cli.model.loss import chunked_loss
from megatrain_cli.model.skeleton import Skeleton
from megatrain_cli.model.template import Head, LayerTemplate, Prologue
from megatrain_cli.plan.decide import Decisions
from megatrain_cli.plan.measured import Measured


def rehearse(
    skeleton: Skeleton, functions: Functions, decisions: Decisions, device: torch.device
) -> Measured:
    """Run every function once at full size on the current stream, and measure a second time.

    What it used is free when it returns, though torch's allocator still has it reserved.

    Args:
        skeleton: Its buffers are on the device.
        functions: Compiled by the first call, if they are to be compiled.
        decisions: Rows, lengths and chunks of the run.
        device: A CUDA device with nothing of the pipeline on it yet.

    Raises:
        Exception: Whatever a compiler fails with.
    """
    stage = _Stage(skeleton, functions, decisions, device)
    kinds = {layer.kind: i for i, layer in enumerate(skeleton.spec.decoder_layers)}
    graph_bytes, layer_bytes = {}, {}
    for kind, index in kinds.items():
        stage.layer(index)
        graph_bytes[kind], layer_bytes[kind] = stage.layer(index)
    tokens = decisions.micro_batch_size * decisions.max_length
    return Measured(graph_bytes, layer_bytes, stage.head_peak(), tokens)


class _Stage:
    """Weights of zeros, random hidden states, and what layers are given besides."""

    def __init__(
        self, skeleton: Skeleton, functions: Functions, decisions: Decisions, device: torch.device
    ) -> None:
        d = decisions
        self._skeleton, self._functions, self._d, self._device = skeleton, functions, d, device
        numel = max(layout.numel for layout in skeleton.layouts)
        self._flat = torch.zeros(numel, dtype=skeleton.dtype, device=device)
        prologue = Prologue(skeleton)
        rows, length = d.micro_batch_size, d.max_length
        ids = torch.zeros(rows, length, dtype=torch.int64, device=device)
        packed = halved_rows(rows, length, device) if skeleton.is_packed else None
        with torch.no_grad():
            hidden, self._args = prologue(prologue.leaves(self._flat), ids, packed)
        self._hidden = torch.randn_like(hidden)
        self._above = torch.randn_like(hidden)

    def layer(self, index: int) -> tuple[int, int]:
        """Bytes that autograd keeps of a layer, and its peak."""
        template = LayerTemplate(self._skeleton, index)
        numel = self._skeleton.layouts[index + 1].numel
        leaves = template.leaves(self._flat)
        args = self._args[index]
        source = self._hidden.detach().requires_grad_()
        with torch.no_grad():  # the first pass of a layer that is computed twice
            self._functions.layer(template, leaves, source, args)
        before = self._start()
        with saved_weights(self._flat[:numel], lambda: self._flat[:numel]):
            result = self._functions.layer(template, leaves, source, args)
        output = get_gradient_edge(result)
        del result
        kept = torch.cuda.memory_allocated(self._device) - before
        torch.autograd.grad([output], [source, *leaves], [self._above], allow_unused=True)
        return kept, torch.cuda.max_memory_allocated(self._device) - before

    def head_peak(self) -> int:
        """Peak bytes of the head, with a whole chunk and with a rest of any size."""
        head = Head(self._skeleton)
        # Zeros for both: whether they share memory changes no size.
        leaves, tied = head.leaves(self._flat), head.tied_leaves(self._flat)
        sums = [torch.zeros(x.shape, device=self._device) for x in (*leaves, *tied)]
        whole = self._functions.whole_chunks(self._d.whole_chunk)
        count = whole.size + (whole.size - 1) // 2 if whole else self._d.head_chunk
        hidden = self._hidden.flatten(0, 1)[:1].expand(count, -1).contiguous()
        targets = torch.zeros(count, dtype=torch.int64, device=self._device)

        def run() -> None:
            chunked_loss(
                self._functions.chunk_loss,
                leaves,
                tied,
                hidden,
                targets,
                scale=1.0,
                chunk=self._d.head_chunk,
                sums=sums,
                whole=whole,
            )

        # What the head gathers and gives back beside its chunks: a hidden state of each position.
        states = 2 * self._hidden.nbytes
        return _peak(run, self._device) + states

    def _start(self) -> int:
        torch.cuda.reset_peak_memory_stats(self._device)
        return torch.cuda.memory_allocated(self._device)


def _peak(run: Callable[[], None], device: torch.device) -> int:
    """Peak bytes of a second run: the first compiles."""
    run()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    return torch.cuda.max_memory_allocated(device) - before
