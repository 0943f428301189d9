"""What to change where a run does not fit. Each way is planned, so what it frees is a fact."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from megatrain_cli.config.schema import KeepLayers, TrainConfig
from megatrain_cli.units import show_bytes

_MASTER = "optimizer.master"
# What of the keys below decides what is learnt.
_LEARNT = frozenset({"model.dtype", _MASTER, "optimizer.max_grad_norm", "data.max_length"})


@dataclass(frozen=True)
class Way:
    """Values to set, by dotted key, and what they cost besides.

    Attributes:
        further: The same way, taken further and further.
    """

    changes: Mapping[str, object]
    price: str = ""
    further: tuple["Way", ...] = ()

    def apply(self, config: TrainConfig) -> TrainConfig:
        """The config with these values."""
        for key, value in self.changes.items():
            section, name = key.split(".")
            changed = getattr(config, section).model_copy(update={name: value})
            config = config.model_copy(update={section: changed})
        return config

    def beside(self, other: "Way") -> "Way | None":
        """Both at once; None where they disagree."""
        if any(other.changes.get(key, value) != value for key, value in self.changes.items()):
            return None
        prices = dict.fromkeys(price for price in (self.price, other.price) if price)
        return Way({**self.changes, **other.changes}, ", ".join(prices))

    def learns_the_same(self, config: TrainConfig) -> bool:
        """Whether what is learnt stays as it was: then only memory and seconds change."""
        changed = {key for key, value in self.changes.items() if _get(config, key) != value}
        if config.optimizer.master == "fp32" and self.changes.get(_MASTER) == "fp32_split":
            changed -= {_MASTER}  # the same bits, kept in two parts
        return not changed & _LEARNT and _rows(self.apply(config)) == _rows(config)

    def is_new(self, config: TrainConfig) -> bool:
        """Whether anything is changed by it."""
        return any(_get(config, key) != value for key, value in self.changes.items())

    def text(self, config: TrainConfig) -> str:
        """What a user has to set, without what is set already."""
        return " with ".join(
            f"`{key}: {_show(value)}`"
            for key, value in self.changes.items()
            if _get(config, key) != value
        )


def host_ways(config: TrainConfig, length: int, *, on_gpu: bool) -> list[Way]:
    """Ways to need less host RAM; without a GPU all that a device holds lies there too.

    Args:
        config: What was asked.
        length: See `device_ways`.
        on_gpu: Whether the run has a GPU.
    """
    bf16 = {"model.dtype": "bfloat16"}
    eager = {
        "optimizer.update": "eager",
        "optimizer.max_grad_norm": None,
        "checkpoint.include_gradients": False,
    }
    ways = [
        _SPLIT_MASTER,
        Way(bf16 | {"optimizer.master": "bf16_stochastic"}, "less exact"),
        Way(eager, "no clipping" if config.optimizer.max_grad_norm is not None else ""),
        Way({"pipeline.grad_slabs": 2}, "less overlap"),
        Way({"checkpoint.bounce_pool": 0}, "updates may wait for a save"),
    ]
    if on_gpu:
        return [*ways, *_fewer_rows(config)]
    body = [*_shorter(config, length), *_fewer_rows(config), *_fewer_buffers(config)]
    return [*ways, _RECOMPUTE, *body]


def device_ways(config: TrainConfig, length: int) -> list[Way]:
    """Ways to need less device memory.

    Args:
        config: What was asked.
        length: Tokens of the longest row as planned. `data.max_length` may be much more, and half
            of it would cut nothing.
    """
    rows, accumulation = config.train.micro_batch_size, config.train.gradient_accumulation_steps
    splits = [
        Way(
            {
                "train.micro_batch_size": fewer,
                "train.gradient_accumulation_steps": accumulation * rows // fewer,
            },
            "the updates stay the same",
        )
        for fewer in _halves(rows)
        if rows % fewer == 0
    ]
    offload = KeepLayers(keep_layers=0, offload=True)
    return [
        *_in_steps(splits),
        _RECOMPUTE,
        Way({"pipeline.activations": offload}, "inputs wait in host RAM"),
        *_shorter(config, length),
        *_fewer_rows(config),
        *_fewer_buffers(config),
        *((_SPLIT_MASTER,) if config.model.dtype == "float32" else ()),
    ]


_RECOMPUTE = Way({"pipeline.activations": "recompute"}, "slower")
_SPLIT_MASTER = Way({"model.dtype": "bfloat16", _MASTER: "fp32_split"})
_CUT = {"truncate": "longer rows are cut", "drop": "longer rows are left out"}


def _shorter(config: TrainConfig, length: int) -> list[Way]:
    """Rows of half the length, unless a longer one is an error."""
    price = _CUT.get(config.data.overlong)
    return _in_steps([Way({"data.max_length": n}, price) for n in _halves(length) if price])


def _fewer_rows(config: TrainConfig) -> list[Way]:
    """Half of a step's rows: each has its inputs of all layers kept until backward."""
    for key in ("train.gradient_accumulation_steps", "train.micro_batch_size"):
        asked = _get(config, key)
        if isinstance(asked, int) and asked > 1:
            return _in_steps([Way({key: n}, "fewer rows a step") for n in _halves(asked)])
    return []


def _halves(number: int) -> list[int]:
    """Half of it, a quarter, and so on, down to 1."""
    return [number >> n for n in range(1, number.bit_length())]


def _in_steps(ways: Sequence[Way]) -> list[Way]:
    """The first as one way that the others take further; none of none."""
    return [replace(ways[0], further=tuple(ways[1:]))] if ways else []


def _fewer_buffers(config: TrainConfig) -> list[Way]:
    """Of two the second holds the layer that comes next; more are fetched further ahead."""
    asked = config.pipeline.staging_buffers
    return [Way({"pipeline.staging_buffers": min(2, asked - 1)}, "less overlap")] * (asked > 1)


def _rows(config: TrainConfig) -> int:
    return config.train.micro_batch_size * config.train.gradient_accumulation_steps


def advise(
    config: TrainConfig, ways: Sequence[Way], measure: Callable[[TrainConfig], int], machine: str
) -> str:
    """The ways that free something, as one text.

    Args:
        config: What was asked.
        ways: What might help.
        measure: Bytes that a config needs in the place that is short.
        machine: The last way out.
    """
    before = measure(config)
    saved = [(before - measure(way.apply(config)), way) for way in ways]
    found = [
        f"{way.text(config)} frees {show_bytes(num_bytes)}" + (f" ({way.price})" * bool(way.price))
        for num_bytes, way in saved
        if num_bytes > 0
    ]
    return "; ".join([*found, f"or use {machine}."] if found else [f"Use {machine}."])


def _get(config: TrainConfig, key: str) -> object:
    section, name = key.split(".")
    value: object = getattr(getattr(config, section), name)
    return value


def _show(value: object) -> str:
    if isinstance(value, KeepLayers):
        return f"{{keep_layers: {value.keep_layers}, offload: {str(value.offload).lower()}}}"
    return "null" if value is None else str(value)
