"""Names, shapes and order of a model's parameters; no tensors.

A model is a sequence of *layers* in order of first use: the embedding (`embed`), the decoder
layers (`layer-00000`, ...), the head (`head`: final norm and LM head). Each has one tile in the
store, one shard on disk and one turn on the device.
"""

import math
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class ParamSpec:
    """One parameter: its full Hugging Face name and its shape.

    Attributes:
        visited: Of a stack of experts along the first dimension, how many a token meets; 0 of a
            parameter that every token meets whole.
    """

    name: str
    shape: tuple[int, ...]
    visited: int = 0

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def active_numel(self) -> int:
        """Elements that a token meets."""
        return self.numel // self.shape[0] * self.visited if self.visited else self.numel

    @property
    def product_numel(self) -> int:
        """Inputs and outputs of a token's products with it; 0 if it is no matrix."""
        shape = self.shape[1:] if self.visited else self.shape
        return max(1, self.visited) * sum(shape[-2:]) if len(shape) >= 2 else 0


@dataclass(frozen=True)
class LayerSpec:
    """One layer of the sequence and the parameters that it owns.

    Attributes:
        name: `embed`, `layer-00012` or `head`.
        kind: Layers of one kind have the same module class and parameter shapes. Kinds decide
            sizes and how often a compile is needed, never correctness.
        params: Owned parameters, in the module's order. A tied weight is owned by `embed` alone.
        prefix: The module's dotted path (`model.layers.12`), empty for `embed` and `head`.
        sees_all: Its tokens see all before them, though other layers have a window.
    """

    name: str
    kind: str
    params: tuple[ParamSpec, ...]
    prefix: str = ""
    sees_all: bool = False

    @cached_property
    def numel(self) -> int:
        """Number of parameters, without alignment."""
        return sum(p.numel for p in self.params)

    @cached_property
    def active_numel(self) -> int:
        """Number of parameters that a token meets: all but the experts that it is not sent to."""
        return sum(p.active_numel for p in self.params)

    @cached_property
    def product_numel(self) -> int:
        """Inputs and outputs of a token's products with all of them."""
        return sum(p.product_numel for p in self.params)


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only language model as a sequence of layers.

    Attributes:
        architecture: Hugging Face class name, such as `LlamaForCausalLM`.
        layers: `embed`, the decoder layers, `head`.
        tied: Names of parameters in `embed` that the head uses too (tied embeddings).
        has_dropout: Whether the config asks for dropout anywhere.
        num_heads: Attention heads of a layer, for memory estimates.
        lookup: What comes before the decoder layers needs no weights in its backward.
        max_positions: Longest sequence that the model defines positions for; None if unbounded.
        attention_width: Heads of queries times their size.
        uneven_heads: A head's values have another width than its keys, as in latent attention.
        window: Tokens that a token sees, itself included, in layers that do not see all; None where
            every layer sees all. Layers that see all do not change it.
    """

    architecture: str
    hidden_size: int
    vocab_size: int
    layers: tuple[LayerSpec, ...]
    tied: tuple[str, ...]
    has_dropout: bool
    max_positions: int | None
    num_heads: int = 1
    lookup: bool = False
    attention_width: int = 0
    uneven_heads: bool = False
    window: int | None = None

    @property
    def embed(self) -> LayerSpec:
        """The first layer."""
        return self.layers[0]

    @property
    def head(self) -> LayerSpec:
        """The last layer."""
        return self.layers[-1]

    @property
    def decoder_layers(self) -> tuple[LayerSpec, ...]:
        """All layers between embedding and head."""
        return self.layers[1:-1]

    @cached_property
    def num_parameters(self) -> int:
        """Number of parameters; a tied weight counts once."""
        return sum(layer.numel for layer in self.layers)

    @cached_property
    def num_active(self) -> int:
        """Number of parameters that a token meets, embedding included."""
        return sum(layer.active_numel for layer in self.layers)
