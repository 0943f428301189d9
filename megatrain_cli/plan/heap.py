"""What small blocks leave in glibc's heap on the CPU: large ones are mappings and go back.

A layer that is computed again takes small blocks and frees them, and the heap keeps the room while
the head maps its logits, or a save its buffers. It needs up to twice the room: torch asks for
aligned blocks, and a hole has no room for an aligned block of its own size. What two steps left
there, and what the formula here says that a layer's small blocks need (torch 2.13, glibc 2.36,
2026-12-01): 20 and 11 MiB with rows of 64 tokens, width 768 and FP32, 48 and 25 with 256, 66 and 42
with 512, 86 and 62 with 1024; 64 and 33 with width 1280 and 256 tokens.
"""

from megatrain_cli.model.spec import LayerSpec
from megatrain_cli.plan.estimates import Sizes, layer_peak
from megatrain_cli.units import MIB

BLOCK_BYTES = 4 * MIB
"""Blocks from this size on are mapped. Smaller ones come again many times in a step."""


def small_blocks(sizes: Sizes) -> int:
    """Bytes of a layer's graph and gradients in blocks that are not mapped; of the fullest layer.

    In a step are rows of many lengths, so that of a block that is mapped for the longest one there
    is one just too small for that.
    """
    return max(_small_blocks(sizes, layer) for layer in sizes.spec.decoder_layers)


def _small_blocks(sizes: Sizes, layer: LayerSpec) -> int:
    gradients = sum(n for p in layer.params if (n := p.numel * sizes.width) < BLOCK_BYTES)
    graph = layer_peak(sizes, layer) - layer.numel * sizes.width
    # A product's input and output have as many elements a token as its weights have sides.
    products = [p for p in layer.params if p.product_numel]
    blocks = [sizes.tokens * side * sizes.width for p in products for side in p.shape[-2:]]
    small = sum(min(block, BLOCK_BYTES) for block in blocks)
    return gradients + graph * small // max(1, sum(blocks))
