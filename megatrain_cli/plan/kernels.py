"""Kernels that torch makes for each length of rows in BF16 on the CPU, and keeps.

Measured with torch 2.13, 2026-12-01, on two cores with AVX-512 BF16: 2 MiB for each shape of
weights, from 16 x 16 to 32000 x 768 (3.3 for 2304 x 768), and for fused attention of rows from 33
tokens on 4.5 to 6.6 MiB on average, however many heads there are and however wide (8 to 128).
Shorter rows are one block where others are blocks and a rest, and take half or less: 1.4 to 2.9.
FP32 and eager attention keep none.

Of the 2 MiB a third is the forward's: rows that are only evaluated kept 3.2 MiB a length of five
shapes, attention hardly anything (2026-12-01, likewise). The head has kernels for each number of
targets in a row, not for lengths: it is given the positions that are learnt alone.
"""

from collections.abc import Iterable

from megatrain_cli.model.spec import ModelSpec, ParamSpec
from megatrain_cli.plan.row_facts import RowFacts
from megatrain_cli.units import MIB

# Of the product with one shape of weights: forward and two backward, alike in size.
_PRODUCT_BYTES, _PRIMITIVES = 2 * MIB, 3
# What oneDNN keeps, unless ONEDNN_PRIMITIVE_CACHE_CAPACITY says otherwise.
_MOST_PRIMITIVES = 1024
# Attention works in blocks, whose sizes come again once some hundred lengths were seen.
_ATTENTION_BYTES, _MOST_ATTENTION = int(6.5 * MIB), 300


def product_shapes(spec: ModelSpec) -> set[tuple[int, ...]]:
    """The shapes of weights that rows are multiplied by; of an embedding, if a tied head does."""
    return _shapes(p for layer in spec.decoder_layers for p in layer.params) | _head_shapes(spec)


def _head_shapes(spec: ModelSpec) -> set[tuple[int, ...]]:
    tied = [p for p in spec.embed.params if p.name in spec.tied]
    return _shapes([*tied, *spec.head.params])


def _shapes(params: Iterable[ParamSpec]) -> set[tuple[int, ...]]:
    return {p.shape[-2:] for p in params if len(p.shape) > 1}


def most_lengths(spec: ModelSpec) -> int:
    """How many lengths of rows there can be before kernels are made anew."""
    return _MOST_PRIMITIVES // (_PRIMITIVES * max(1, len(product_shapes(spec))))


def kernel_bytes(spec: ModelSpec, rows: RowFacts, *, fused: bool) -> int:
    """What all of them take: products x 2/3 MiB, and what attention sees x 6.5 MiB.

    Args:
        spec: Of the model.
        rows: Their lengths and numbers of targets.
        fused: Whether attention is.
    """
    head = len(_head_shapes(spec))
    layers = len(product_shapes(spec)) - head
    primitives = layers * (_PRIMITIVES * rows.lengths + rows.eval_lengths)
    primitives += head * (_PRIMITIVES * rows.targets + rows.eval_targets)
    products = min(primitives, _MOST_PRIMITIVES) * _PRODUCT_BYTES // _PRIMITIVES
    return products + min(rows.spans, _MOST_ATTENTION) * _ATTENTION_BYTES * fused


def length_bytes(spec: ModelSpec, *, fused: bool) -> int:
    """What one length of rows takes that are trained on, with a number of targets of its own."""
    one = RowFacts(0, 0, 0, 0, 0, lengths=1, spans=1, targets=1)
    return kernel_bytes(spec, one, fused=fused)
