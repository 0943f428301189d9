"""Published models by name: what their config.json says of sizes, without a hub."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import yaml

from megatrain_cli.config.names import did_you_mean
from megatrain_cli.errors import ModelError

_FILE = Path(__file__).with_name("shapes.yaml")


@dataclass(frozen=True)
class Shape:
    """Sizes of one model.

    Attributes:
        type: `model_type` of its config.json.
        heads: Of queries.
        kv: Heads of keys and values.
        tied: Whether the head shares the embedding's weights.
        attention: `auto`, or the only kernel that the family has.
        biased: Whether attention has biases; None leaves that to the family.
        parameters: As published; tied ones once.
        active: Of a mixture of experts, parameters that a token meets, as published.
        more: Fields of config.json that only this family has, under their names there.
    """

    name: str
    type: str
    hidden: int
    layers: int
    ffn: int
    heads: int
    kv: int
    vocab: int
    positions: int
    parameters: int
    head_dim: int | None = None
    tied: bool = False
    biased: bool | None = None
    attention: str = "auto"
    active: int | None = None
    more: Mapping[str, object] = field(default_factory=dict)

    def config_values(self) -> dict[str, object]:
        """Under the names of config.json."""
        values: dict[str, object] = {
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "intermediate_size": self.ffn,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.positions,
            "tie_word_embeddings": self.tied,
        }
        if self.head_dim is not None:
            values["head_dim"] = self.head_dim
        if self.biased is not None:
            values["attention_bias"] = self.biased
        return values | dict(self.more)


@cache
def known_shapes() -> dict[str, Shape]:
    """All of them, by name."""
    read = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    return {
        name: Shape(name=name, **({"kv": values["heads"]} | values))
        for name, values in read.items()
    }


def find_shape(name: str) -> Shape:
    """The shape of a name, in any case.

    Raises:
        ModelError: No such name.
    """
    wanted, shapes = name.lower(), known_shapes()
    if wanted in shapes:
        return shapes[wanted]
    hint = did_you_mean(wanted.rpartition("/")[2], shapes)  # of `owner/name`, as a hub has it
    raise ModelError(
        f"There is no model `{name}` in the list. {hint}Known are {', '.join(shapes)}. Any other "
        "is planned from a config whose `model.path` has its config.json."
    )
