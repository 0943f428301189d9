"""Compiled functions: the same numbers, all layers of a kind in one form, no compile in a run."""

from pathlib import Path

import pytest
import torch

from megatrain_cli.model.functions import compiled_functions, eager_functions
from megatrain_cli.model.template import Head, LayerTemplate, Prologue
from tests.families import KINDS, make_tiny
from tests.model.streamed import LAYERS, Streamed, random_ids, save_and_open


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_layers_and_head_are_the_eager_ones_and_are_compiled_once(
    kind: str, tmp_path: Path
) -> None:
    torch.compiler.reset()
    model = save_and_open(make_tiny(kind, tied=True), tmp_path, torch.float32, "sdpa")
    streamed = Streamed.open(model, tmp_path, torch.float32, "sdpa")
    head = Head(streamed.skeleton)
    # Traces forward and backward as on a GPU, without needing a compiler on the machine.
    compiled, eager = compiled_functions(head, backend="aot_eager"), eager_functions(head)
    assert compiled.compiled
    assert not eager.compiled
    assert eager.whole_chunks(4) is None
    prologue = Prologue(streamed.skeleton)
    hidden, args = prologue(prologue.leaves(streamed.runs[0]), random_ids(2, 13))

    def layer(index: int, *, graph: bool) -> None:
        template = LayerTemplate(streamed.skeleton, index)
        leaves = template.leaves(streamed.runs[index + 1])
        source = hidden.detach().requires_grad_()
        outputs = []
        for functions in (compiled, eager):
            with torch.set_grad_enabled(graph):
                output = functions.layer(template, leaves, source, args[index])
            outputs.append([output])
            if graph:
                outputs[-1] += torch.autograd.grad(output.sum(), (source, *leaves))
        for a, b in zip(*outputs, strict=True):
            torch.testing.assert_close(a, b)

    def chunk(size: int) -> None:
        leaves = head.leaves(streamed.runs[-1])
        tied = head.tied_leaves(streamed.runs[0])
        inputs = torch.randn(size, hidden.shape[-1]).requires_grad_()
        targets = torch.randint(0, 50, (size,))
        targets[0] = -100
        whole = compiled.whole_chunks(size)
        assert whole is not None
        found = []
        for loss in (whole.loss, eager.chunk_loss):
            summed = loss(leaves, tied, inputs, targets)
            found.append([summed, *torch.autograd.grad(summed, (inputs, *leaves, *tied))])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b)

    layer(0, graph=False)
    layer(0, graph=True)
    chunk(8)
    with compiled.no_recompile():
        for index in range(LAYERS):
            layer(index, graph=False)
            layer(index, graph=True)
        chunk(8)
        with pytest.raises(RuntimeError, match="recompile"):
            chunk(9)
