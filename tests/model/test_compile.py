"""Compiled once: all decoder layers of one kind share one graph, and the head is one graph."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from megatrain_cli.model.handles import saved_weights
from megatrain_cli.model.recorder import LayerArgs
from megatrain_cli.model.template import Head, LayerTemplate, Prologue
from tests.families import KINDS, make_tiny
from tests.model.streamed import LAYERS, Streamed, random_ids, save_and_open


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_layers_compile_to_one_graph_and_keep_handles(kind: str, tmp_path: Path) -> None:
    torch.compiler.reset()
    model = save_and_open(make_tiny(kind, tied=True), tmp_path, torch.float32, "sdpa")
    streamed = Streamed.open(model, tmp_path, torch.float32, "sdpa")
    # Traces forward and backward as on a GPU, without needing a compiler on the machine.
    counter = CompileCounterWithBackend("aot_eager")

    def call(template: LayerTemplate, leaves: list[Tensor], x: Tensor, args: LayerArgs) -> Tensor:
        return template(leaves, x, args)

    compiled = torch.compile(call, backend=counter, dynamic=False)
    prologue = Prologue(streamed.skeleton)
    hidden, args = prologue(prologue.leaves(streamed.runs[0]), random_ids(2, 13))
    for index in range(LAYERS):
        template = LayerTemplate(streamed.skeleton, index)
        run = streamed.runs[index + 1]
        hidden = hidden.detach().requires_grad_()
        leaves = template.leaves(run)
        expected = torch.autograd.grad(
            template(leaves, hidden, args[index]).sum(), (hidden, *leaves)
        )
        slot, elsewhere = run.clone(), run.clone()
        leaves = template.leaves(slot)
        with saved_weights(slot, lambda elsewhere=elsewhere: elsewhere):  # type: ignore[misc]
            output = compiled(template, leaves, hidden, args[index])
        slot.fill_(float("nan"))
        found = torch.autograd.grad(output.sum(), (hidden, *leaves))
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)
        hidden = output
    assert counter.frame_count == 1

    head = Head(streamed.skeleton)
    leaves, tied = head.leaves(streamed.runs[-1]), head.tied_leaves(streamed.runs[0])
    flat = hidden.detach().flatten(0, 1)
    compiled_head = torch.compile(head, backend=counter, dynamic=False, fullgraph=True)
    torch.testing.assert_close(compiled_head(leaves, tied, flat), head(leaves, tied, flat))
    assert counter.frame_count == 2
