"""Operations of a layer: the one place where they are counted.

A product of an `(m, k)` and a `(k, n)` matrix is `2 m k n` operations: 2 a weight and a token in
forward. Backward makes two such products. Of a mixture's experts only those count that a token
meets; the others are moved and updated, and multiply nothing. Attention is two products of queries
and keys a pair of tokens that see each other, in all heads: `4 x pairs x width`; a causal row of T
tokens has `T (T + 1) / 2` pairs. Fused kernels compute the first product again in backward, so that
is five products to forward's two (Dao et al., "FlashAttention", 2022).
"""

from dataclasses import dataclass

from megatrain_cli.model.spec import ModelSpec

BACKWARD_ATTENTION = 2.5
"""Operations of attention's backward by those of its forward."""


@dataclass(frozen=True)
class LayerFlops:
    """Operations of one layer over some rows."""

    forward: float
    backward: float


def layer_flops(spec: ModelSpec, layer: int, rows: int, length: int, *, whole: bool) -> LayerFlops:
    """Operations of a layer's forward and backward.

    Args:
        spec: The model.
        layer: Its place in the sequence, embedding and head included.
        rows: That pass through it.
        length: Tokens a row.
        whole: Whether rows are one document each; of packed rows no attention is counted, since
            how long their documents are is not known.
    """
    tokens = rows * length
    last = len(spec.layers) - 1
    numel = spec.layers[layer].active_numel
    if layer == 0:
        return LayerFlops(0, 0)  # looking up an embedding multiplies nothing
    if layer == last and spec.tied:
        numel += spec.embed.numel
    products = 2.0 * numel * tokens
    attention = 0.0
    if whole and layer != last:
        window = None if spec.layers[layer].sees_all else spec.window
        attention = 4.0 * rows * visible_pairs(length, window) * spec.attention_width
    return LayerFlops(products + attention, 2 * products + BACKWARD_ATTENTION * attention)


def visible_pairs(length: int, window: int | None) -> int:
    """Pairs of tokens of one causal row of which the later sees the earlier, itself included."""
    seen = length if window is None else min(length, window)
    return seen * (seen + 1) // 2 + (length - seen) * seen
