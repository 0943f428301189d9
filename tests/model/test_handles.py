"""Activations may be kept while the weights they were made with move to another slot."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain_cli.errors import InternalError
from megatrain_cli.model.handles import saved_weights
from megatrain_cli.model.template import LayerTemplate, Prologue
from tests.families import KINDS, make_tiny
from tests.model.streamed import Streamed, random_ids, save_and_open


def run_layer(
    streamed: Streamed, slot: Tensor, current: Callable[[], Tensor] | None
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output, input and weights of layer 1 run in a slot, with handles if `current` is given."""
    prologue, template = Prologue(streamed.skeleton), LayerTemplate(streamed.skeleton, 1)
    hidden, args = prologue(prologue.leaves(streamed.runs[0]), random_ids(2, 13))
    hidden = hidden.detach().requires_grad_()
    slot.copy_(streamed.runs[2])
    leaves = template.leaves(slot)
    if current is None:
        return template(leaves, hidden, args[1]), hidden, leaves
    with saved_weights(slot, current):
        return template(leaves, hidden, args[1]), hidden, leaves


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_gradients_are_exact_after_the_weights_moved_to_another_slot(
    kind: str, attention: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = save_and_open(make_tiny(kind, tied=True), tmp_path, dtype, attention)
    streamed = Streamed.open(model, tmp_path, dtype, attention)
    numel = streamed.runs[2].numel()
    output, hidden, leaves = run_layer(streamed, torch.empty(numel, dtype=dtype), None)
    expected = torch.autograd.grad(output, (hidden, *leaves), torch.ones_like(output))

    # Slots larger than the layer, and not at the start of their storage.
    slot_a = torch.full((numel + 512,), float("nan"), dtype=dtype)[256 : 256 + numel]
    slot_b = torch.full((numel + 512,), float("nan"), dtype=dtype)[128 : 128 + numel]
    output, hidden, leaves = run_layer(streamed, slot_a, lambda: slot_b)
    slot_a.fill_(float("nan"))
    slot_b.copy_(streamed.runs[2])
    found = torch.autograd.grad(output, (hidden, *leaves), torch.ones_like(output))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def count_aliases(output: Tensor, slot: Tensor) -> int:
    """Saved tensors in the graph of `output` that still lie in the slot's storage."""
    storage = slot.untyped_storage().data_ptr()
    seen: set[object] = set()
    todo: list[Any] = [output.grad_fn]
    aliases = 0
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [next_node for next_node, _ in node.next_functions]
        for name in (n for n in dir(node) if n.startswith("_raw_saved_")):
            raw = getattr(node, name)
            for saved in raw if isinstance(raw, tuple) else (raw,):
                packed = saved.data
                if isinstance(packed, Tensor):
                    aliases += packed.untyped_storage().data_ptr() == storage
    return aliases


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_no_saved_tensor_points_into_the_slot(kind: str, attention: str, tmp_path: Path) -> None:
    model = save_and_open(make_tiny(kind, tied=True), tmp_path, torch.float32, attention)
    streamed = Streamed.open(model, tmp_path, torch.float32, attention)
    slot = torch.empty_like(streamed.runs[2])
    restored = 0

    def current() -> Tensor:
        nonlocal restored
        restored += 1
        return slot

    plain, _, _ = run_layer(streamed, slot, None)
    kept, hidden, _ = run_layer(streamed, slot, current)
    assert count_aliases(plain, slot) >= 4  # the count sees what it looks for
    assert count_aliases(kept, slot) == 0
    kept.sum().backward()
    assert restored >= 4
    assert hidden.grad is not None


def test_a_slot_that_holds_another_layer_stops_backward(tmp_path: Path) -> None:
    model = save_and_open(make_tiny("llama", tied=True), tmp_path, torch.float32, "sdpa")
    streamed = Streamed.open(model, tmp_path, torch.float32, "sdpa")

    def wrong_layer() -> Tensor:
        raise InternalError("slot 0 holds layer 3, not layer 1")

    output, _, _ = run_layer(streamed, torch.empty_like(streamed.runs[2]), wrong_layer)
    with pytest.raises(InternalError, match="slot 0 holds layer 3"):
        output.sum().backward()


def test_a_run_of_another_size_stops_backward(tmp_path: Path) -> None:
    model = save_and_open(make_tiny("llama", tied=True), tmp_path, torch.float32, "sdpa")
    streamed = Streamed.open(model, tmp_path, torch.float32, "sdpa")
    slot = torch.empty_like(streamed.runs[2])
    output, _, _ = run_layer(streamed, slot, lambda: slot[:-1])
    with pytest.raises(InternalError, match="in forward"):
        output.sum().backward()
