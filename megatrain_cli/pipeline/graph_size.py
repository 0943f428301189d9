"""What autograd keeps of a layer on the CPU, counted where it saves: no step need be run for it.

Torch's CPU allocator tells no peak, but all that a graph keeps for its backward passes through the
hooks of saved tensors. What a layer keeps is a sum of parts that are constant, follow the tokens,
or follow their square (scores of attention that is not fused), so three short rows tell the size
for a row of any length.
"""

from dataclasses import replace

import torch
from torch import Tensor

from megatrain_cli.errors import InternalError
from megatrain_cli.model.attention import halved_rows
from megatrain_cli.model.functions import run_layer
from megatrain_cli.model.skeleton import Skeleton
from megatrain_cli.model.template import LayerTemplate, Prologue
from megatrain_cli.plan.decide import Decisions
from megatrain_cli.plan.measured import Measured

# Rows that are tried: this long, twice and three times as long.
_SHORT = 32

# Of a graph: gradients between a layer's parts that backward holds while the graph shrinks.
_BETWEEN = 0.3


def measure_graphs(skeleton: Skeleton, decisions: Decisions) -> Measured:
    """Count what one row of `max_length` tokens keeps, for each kind of layer.

    Peaks are graphs plus the gradients of a layer's parameters, and for the head logits: these are
    formulas.

    Args:
        skeleton: On the CPU.
        decisions: Of the run.
    """
    d, spec = replace(decisions, micro_batch_size=1), skeleton.spec
    length, width = d.max_length, skeleton.dtype.itemsize
    kinds = {layer.kind: i for i, layer in enumerate(spec.decoder_layers)}
    tried = (length,) if length <= 3 * _SHORT else (_SHORT, 2 * _SHORT, 3 * _SHORT)
    found = [_graphs(skeleton, n, list(kinds.values())) for n in tried]
    graphs, layers = {}, {}
    for kind, index in kinds.items():
        graph = _extended([sizes[index] for sizes in found], length)
        gradients = skeleton.layouts[index + 1].numel * width
        graphs[kind] = graph
        layers[kind] = graph + int(_BETWEEN * graph) + gradients
    return Measured(graphs, layers, _head_bytes(skeleton, d), length)


def _graphs(skeleton: Skeleton, length: int, indices: list[int]) -> dict[int, int]:
    """Bytes that each of some layers keeps of one row."""
    flat = torch.zeros(max(layout.numel for layout in skeleton.layouts), dtype=skeleton.dtype)
    prologue = Prologue(skeleton)
    ids = torch.zeros(1, length, dtype=torch.int64)
    packed = halved_rows(1, length, ids.device) if skeleton.is_packed else None
    with torch.no_grad():
        hidden, args = prologue(prologue.leaves(flat), ids, packed)
    found = {}
    for index in indices:
        template = LayerTemplate(skeleton, index)
        source = torch.randn_like(hidden).requires_grad_()
        kept: dict[int, torch.UntypedStorage] = {}  # alive, or their addresses would come again

        def count(tensor: Tensor, kept: dict[int, torch.UntypedStorage] = kept) -> None:
            # The tensor itself must not be saved: what a function saves of its own result would
            # be a cycle that nothing collects.
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage

        with torch.random.fork_rng([]), torch.autograd.graph.saved_tensors_hooks(count, _no_way):
            run_layer(template, template.leaves(flat), source, args[index])
        # Weights are a view of a slot, the source of an input's buffer: both have lines of their
        # own. What all layers are given, such as rotary tables, is counted once for each: little.
        for shared in (flat, source):
            kept.pop(shared.untyped_storage().data_ptr(), None)
        found[index] = sum(storage.nbytes() for storage in kept.values())
    return found


def _extended(sizes: list[int], length: int) -> int:
    """The value at `length` of the parabola through sizes at 1, 2 and 3 times `_SHORT`."""
    if len(sizes) == 1:
        return sizes[0]
    first, second, third = sizes
    n, rise = length / _SHORT, second - first
    bend = max(0, third - second - rise)
    return round(first + (n - 1) * rise + (n - 1) * (n - 2) / 2 * bend)


def _head_bytes(skeleton: Skeleton, d: Decisions) -> int:
    """Of one chunk at the fuller of two moments.

    In the loss's backward there are probabilities and two gradients in FP32. When these are gone,
    the product's has the gradients of logits and weight.
    """
    spec, width = skeleton.spec, skeleton.dtype.itemsize
    logits = min(d.head_chunk, d.max_length) * spec.vocab_size
    weight = spec.vocab_size * spec.hidden_size
    states = 2 * d.max_length * spec.hidden_size * width
    return max(3 * 4 * logits, width * (logits + weight)) + states


def _no_way(saved: object) -> Tensor:
    raise InternalError(f"a graph was only counted, and {saved} of it is asked for")
