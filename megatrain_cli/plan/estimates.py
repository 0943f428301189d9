"""What a layer and the head take at work: measured, or estimated before anything is measured."""

from dataclasses import dataclass

from megatrain_cli.model.layout import LayerLayout
from megatrain_cli.model.spec import LayerSpec, ModelSpec
from megatrain_cli.plan.decide import Decisions
from megatrain_cli.plan.measured import Measured
from megatrain_cli.plan.row_facts import RowFacts
from megatrain_cli.plan.tiles import DTYPE_BYTES

# Factors of the estimates below, for plans made before anything is measured. Those of compiled
# layers are an H200's (3B and 7B shapes, 8192 to 131,072 tokens, 2026-11-30): queries, keys and
# values share an input, as gates do, which is kept once. No two stacks of experts share one: by
# torch 2.13's partitioner on the CPU it is 0.92 to 1.1 in eight families, for dense parts as they
# are alone, and 0.87 for the 3B shape. Eager norms keep FP32 copies of what they normalise, and a
# product's backward holds the gradients of its inputs beside the graph.
_GRAPH, _COMPILED_GRAPH, _COMPILED_EXPERTS = 1.5, 0.84, 1.1
_BACKWARD, _COMPILED_BACKWARD = 1.4, 1.25


@dataclass(frozen=True)
class Sizes:
    """What the formulas are made of; without `measured`, some are estimates.

    Attributes:
        program_bytes: See `MachineSpec.program_bytes`.
    """

    spec: ModelSpec
    layouts: tuple[LayerLayout, ...]
    decisions: Decisions
    on_gpu: bool
    measured: Measured | None = None
    rows: RowFacts | None = None
    program_bytes: int = 0

    @property
    def width(self) -> int:
        """Bytes of one element in the compute dtype."""
        return DTYPE_BYTES[self.decisions.dtype]

    @property
    def num_recomputed(self) -> int:
        """Decoder layers whose activations are computed again."""
        return len(self.spec.decoder_layers) - self.decisions.keep_layers

    @property
    def tokens(self) -> int:
        """Of one micro-batch, padding included."""
        return self.decisions.micro_batch_size * self.decisions.max_length

    @property
    def step_tokens(self) -> int:
        """Of all micro-batches of a step; the CPU fills none of them up."""
        full = self.decisions.num_micro_batches * self.tokens
        if self.on_gpu or self.rows is None:
            return full
        return min(full, self.rows.step_tokens)

    @property
    def hidden_bytes(self) -> int:
        """One micro-batch's hidden states."""
        return self.tokens * self.spec.hidden_size * self.width

    @property
    def largest_numel(self) -> int:
        """Elements of the largest run."""
        return max(layout.numel for layout in self.layouts)


def graph_bytes(sizes: Sizes, layer: LayerSpec) -> int:
    """What autograd keeps of one layer and micro-batch; an estimate if it was not measured.

    Every matrix product keeps its input, and what follows it keeps its output: (in + out) elements
    a token, and half as much again for eager norms; compiled ones are computed again. Of experts
    this is so for each one that a token meets. Attention that is not fused also keeps T x T scores
    of each head.
    """
    if sizes.measured:
        return sizes.measured.graph_of(layer.kind, sizes.tokens)
    d = sizes.decisions
    experts = sum(param.product_numel for param in layer.params if param.visited)
    others = layer.product_numel - experts
    factor, of_experts = (_COMPILED_GRAPH, _COMPILED_EXPERTS) if d.compiled else (_GRAPH, _GRAPH)
    num_bytes = int(sizes.tokens * sizes.width * (factor * others + of_experts * experts))
    return num_bytes + _pair_bytes(sizes) * sizes.tokens * d.max_length


def _pair_bytes(sizes: Sizes) -> int:
    """Of each two tokens of a row; fused attention keeps none.

    Eager attention keeps each head's scores in FP32 and once more (counted in BF16 with
    transformers 5.24: 6 bytes, 8 where they are capped, 2 in GPT-OSS); compiled, twice in the
    compute dtype, and one mask. `sdpa` on the CPU keeps them where a head's keys and values differ
    in width, for torch has no fused kernel for those.
    """
    d, heads = sizes.decisions, sizes.spec.num_heads
    if d.attention == "eager":
        return (2 * heads + 1) * sizes.width if d.compiled else 2 * 4 * heads
    unfused = d.attention == "sdpa" and sizes.spec.uneven_heads and not sizes.on_gpu
    return 4 * heads if unfused else 0


def kept_bytes(sizes: Sizes) -> int:
    """Graphs of the kept layers, of all tokens of a step."""
    kept = sizes.spec.decoder_layers[sizes.num_recomputed :]
    graphs = sum(graph_bytes(sizes, layer) for layer in kept)
    return -(-graphs * sizes.step_tokens // sizes.tokens)


def layer_at_work(sizes: Sizes) -> int:
    """What a layer at its backward takes at most beyond all that is kept.

    Kept layers are the last ones, so backward begins with them. Their graphs are on that bill and
    are let go one after the other; a layer that is computed again has the room that they took.
    """
    layers = sizes.spec.decoder_layers
    kept = live = kept_bytes(sizes)
    beside = 0
    for i in reversed(range(len(layers))):
        graph = graph_bytes(sizes, layers[i]) if i >= sizes.num_recomputed else 0
        beside = max(beside, live - graph + layer_peak(sizes, layers[i]) - kept)
        live -= graph * sizes.step_tokens // sizes.tokens
    return beside


def backward_factor(sizes: Sizes) -> float:
    """What a layer's backward holds at most, by its graph; an estimate."""
    return _COMPILED_BACKWARD if sizes.decisions.compiled else _BACKWARD


def layer_peak(sizes: Sizes, layer: LayerSpec) -> int:
    """Of a layer's forward and backward alone, its graph included."""
    if sizes.measured:
        return sizes.measured.layer_of(layer.kind, sizes.tokens)
    gradients = layer.numel * sizes.width
    return int(backward_factor(sizes) * graph_bytes(sizes, layer)) + gradients


def chunk_at_work(sizes: Sizes) -> int:
    """Logits of a chunk, the weight's gradient, and the positions' hidden states.

    Eager, logits and their gradient in the compute dtype and FP32; compiled, one copy of both in
    the compute dtype. An evaluation scores eager chunks without a backward, which is less.
    """
    if sizes.measured:
        return sizes.measured.head_bytes
    d = sizes.decisions
    logits = min(d.head_chunk, sizes.tokens) * sizes.spec.vocab_size * (2 * sizes.width + 2 * 4)
    logits = max(logits, d.whole_chunk * sizes.spec.vocab_size * sizes.width)
    weight = sizes.spec.vocab_size * sizes.spec.hidden_size * sizes.width
    return logits + weight + 2 * sizes.hidden_bytes
