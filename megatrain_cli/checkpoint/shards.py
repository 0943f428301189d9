"""The files of a checkpoint: a layer's shard with its parts, and all that is no tensor."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import StringConstraints, model_validator

from megatrain_cli.checkpoint.facts import Pending
from megatrain_cli.checkpoint.places import ALIGNMENT, TensorPlace, check_places, short
from megatrain_cli.checkpoint.record import Count, Record, Xxh128, check_unique

MAX_TENSORS = 1_000_000
"""Most tensors of all parts together."""

# Headers end before 100 MB; whoever checks one reads that much at most.
_MAX_DATA_START = 100 << 20

PartName = Literal["weights", "optim", "grads"]

_WEIGHTS_FILE = r"model[a-z0-9._-]{0,110}\.safetensors"
_TRAINING_FILE = r"training/[a-z0-9][a-z0-9._-]{0,110}\.safetensors"
PartFile = Annotated[str, StringConstraints(pattern=f"^({_WEIGHTS_FILE}|{_TRAINING_FILE})$")]
AuxName = Annotated[
    str, StringConstraints(pattern=r"^(training/)?[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
]


class Part(Record):
    """One safetensors file: a layer's weights, its optimizer state or its pending gradients.

    Attributes:
        file: Relative to the checkpoint.
        bytes: Size of the file.
        data_start: Where the payload begins.
        xxh3_128: Of the whole file.
        tensors: In the order of their bytes, counted from `data_start`.
    """

    part: PartName
    file: PartFile
    bytes: Count
    data_start: Count
    xxh3_128: Xxh128
    tensors: tuple[TensorPlace, ...]

    @model_validator(mode="after")
    def _whole(self) -> "Part":
        if self.file.startswith("model") != (self.part == "weights"):
            raise ValueError(f"{self.file} cannot hold {self.part}")
        if self.data_start % ALIGNMENT or not 0 < self.data_start <= _MAX_DATA_START:
            raise ValueError(f"{self.file}: the payload cannot begin at {self.data_start}")
        check_places(self.tensors, self.bytes - self.data_start)
        return self


class Shard(Record):
    """One layer: its weights, its optimizer state, and its gradients if an update is pending.

    Attributes:
        index: Place in the model's order, from 0.
        layer_step: Updates this layer has had.
        parts: Weights, optim, and perhaps grads, in this order.
    """

    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
    index: Count
    layer_step: Count
    parts: tuple[Part, ...]

    @property
    def weights(self) -> Part:
        """The part that every shard begins with."""
        return self.parts[0]

    @property
    def has_grads(self) -> bool:
        """Whether an update of this layer is pending."""
        return len(self.parts) == 3

    @model_validator(mode="after")
    def _complete(self) -> "Shard":
        kinds = [part.part for part in self.parts]
        if kinds not in (["weights", "optim"], ["weights", "optim", "grads"]):
            raise ValueError(f"{self.name} has the parts {kinds}, wanted weights, optim[, grads]")
        shapes = {place.name: place.shape for place in self.weights.tensors}
        for part in self.parts[1:]:
            for place in part.tensors:
                kind, _, weight = place.name.partition(".")
                if shapes.get(weight) != place.shape:
                    raise ValueError(f"{part.file}: {short(place.name)} fits no weight")
                if (part.part == "grads") != (kind == "grad"):
                    raise ValueError(f"{part.file}: {short(place.name)} is in the wrong part")
        if self.has_grads and len(self.parts[2].tensors) != len(shapes):
            raise ValueError(f"{self.parts[2].file}: not one gradient for each weight")
        return self


class AuxFile(Record):
    """A file that is no shard: config, tokenizer, index, the run's config and plan."""

    file: AuxName
    bytes: Count
    xxh3_128: Xxh128

    @model_validator(mode="after")
    def _no_shard(self) -> "AuxFile":
        name = self.file.casefold()
        if name in ("manifest.json", "keep", "training") or name.endswith(".safetensors"):
            raise ValueError(f"{self.file} cannot be among the aux files")
        return self


def check_shards(
    shards: Sequence[Shard], step: int, num_parameters: int, pending: Pending | None
) -> None:
    """All layers in order, each tensor once, all at one step unless an update is pending.

    Raises:
        ValueError: Not so.
    """
    if not shards or [shard.index for shard in shards] != list(range(len(shards))):
        raise ValueError("the shards are not numbered 0, 1, 2, ... in this order")
    check_unique("shard", (shard.name for shard in shards))
    weights = [place for shard in shards for place in shard.weights.tensors]
    if len({place.name for place in weights}) != len(weights):
        raise ValueError("a weight is in two shards")
    if sum(len(part.tensors) for shard in shards for part in shard.parts) > MAX_TENSORS:
        raise ValueError(f"more than {MAX_TENSORS} tensors")
    held = sum(place.numel for place in weights)
    if held != num_parameters:
        raise ValueError(f"the shards hold {held} parameters, the model has {num_parameters}")
    if step != max(shard.layer_step for shard in shards):
        raise ValueError(f"step {step} is not the largest layer_step")
    possible = (step,) if pending is None else (pending.step - 1, pending.step)
    for shard in shards:
        if shard.layer_step not in possible:
            raise ValueError(f"{shard.name} is at step {shard.layer_step}, possible is {possible}")
        if shard.has_grads != (pending is not None and shard.layer_step == possible[0]):
            raise ValueError(f"{shard.name}: grads, if and only if its update is pending")
    if pending is not None and not any(shard.has_grads for shard in shards):
        raise ValueError("an update is pending, but no shard has gradients")
