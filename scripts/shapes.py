"""Published model shapes, and made-up rows for them: nothing is downloaded."""

import argparse
import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatrain_cli.model.shapes import find_shape


@dataclass(frozen=True)
class Shape:
    """A model as its config.json tells it."""

    name: str
    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool
    kind: str = "qwen2"

    @property
    def embedding(self) -> int:
        """Parameters of the token embedding."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters; tied ones once."""
        qkv_width = self.hidden // self.heads * (self.heads + 2 * self.kv_heads)
        bias = qkv_width if self.kind == "qwen2" else 0
        attention = self.hidden * qkv_width + bias + self.hidden**2
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.layers * layer + self.embedding * (1 if self.tied else 2) + self.hidden


def _published(name: str) -> Shape:
    """A shape of the package's list, under its size alone."""
    known = find_shape(name)
    return Shape(
        name.rpartition("-")[2],
        known.hidden,
        known.layers,
        known.ffn,
        known.heads,
        known.kv,
        known.vocab,
        known.tied,
        known.type,
    )


_TINY = Shape("tiny", 64, 2, 128, 4, 2, 512, tied=True)  # for a look on any CPU
_PUBLISHED = (
    *("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b", "qwen2.5-14b"),
    *("llama-3-8b", "llama-3-70b"),
)
SHAPES = {shape.name: shape for shape in (_TINY, *map(_published, _PUBLISHED))}


@dataclass(frozen=True)
class Batch:
    """Rows of one optimizer step, and their length in tokens."""

    rows: int
    length: int

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.rows * self.length

    def __str__(self) -> str:
        """As it is typed."""
        return f"{self.rows}x{self.length}"


def parse_shape(text: str) -> Shape:
    """`3b`, or `70b:4` for its first 4 decoder layers."""
    name, colon, layers = text.partition(":")
    if name not in SHAPES or (colon and not re.fullmatch(r"[1-9]\d*", layers)):
        raise argparse.ArgumentTypeError(f"wanted one of {', '.join(SHAPES)}, or NAME:LAYERS")
    return replace(SHAPES[name], name=text, layers=int(layers)) if colon else SHAPES[name]


def parse_batch(text: str) -> Batch:
    """`8x1024`."""
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", text):
        raise argparse.ArgumentTypeError("wanted ROWSxLENGTH, as 8x1024")
    rows, length = map(int, text.split("x"))
    return Batch(rows, length)


def write_model(folder: Path, shape: Shape) -> None:
    """A folder with a config.json: enough for random weights."""
    from transformers import LlamaConfig, Qwen2Config

    make = Qwen2Config if shape.kind == "qwen2" else LlamaConfig
    config = make(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=131072,
        tie_word_embeddings=shape.tied,
    )
    config.save_pretrained(folder)


def make_tokens(shape: Shape, batch: Batch, step: int) -> NDArray[np.int64]:
    """The tokens of a step, `(rows, length)`: the same for whoever trains on them."""
    draw = np.random.default_rng(step)
    return draw.integers(0, shape.vocabulary, (batch.rows, batch.length), dtype=np.int64)


def make_documents(batch: Batch, mean: int, step: int) -> NDArray[np.int32]:
    """The number of each token's document within its row, `(rows, length)`.

    Documents have half to one and a half times `mean` tokens; the row's end cuts the last one.
    """
    draw = np.random.default_rng(step)
    numbers = np.zeros((batch.rows, batch.length), dtype=np.int32)
    for row in numbers:
        start = 0
        while (start := start + int(draw.integers(max(mean // 2, 1), mean * 3 // 2 + 1))) < len(
            row
        ):
            row[start:] += 1
    return numbers


def tflops(shape: Shape, batch: Batch, seconds: float) -> float:
    """6 x parameters x tokens a second: what is computed twice counts once."""
    return 6 * shape.parameters * batch.tokens / seconds / 1e12
