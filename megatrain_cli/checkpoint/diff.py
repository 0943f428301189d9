"""Two checkpoints compared bit by bit: which tensors differ, in how many elements, from where."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

import numpy as np
from pydantic import JsonValue

from megatrain_cli.checkpoint.elements import patterns
from megatrain_cli.checkpoint.folder import OpenCheckpoint
from megatrain_cli.checkpoint.manifest import Part
from megatrain_cli.checkpoint.pieces import pieces, spread
from megatrain_cli.checkpoint.places import TensorPlace

# What tells one save from another and says nothing about the state that was saved.
_IDENTITY = frozenset(
    {"save_id", "created", "run_id", "attempt", "parent", "shards", "aux", "bytes_total"}
)


@dataclass(frozen=True)
class TensorDiff:
    """One tensor whose bits differ.

    Attributes:
        count: Elements of the tensor.
        differing: Elements that differ in any bit; a NaN equals itself, 0 and -0 differ.
        first: Index of the first of them, in the tensor's shape.
    """

    name: str
    count: int
    differing: int
    first: tuple[int, ...]


@dataclass(frozen=True)
class Difference:
    """What is not the same in two checkpoints.

    Attributes:
        only_left: Tensors that only the first has.
        only_right: Tensors that only the second has.
        reshaped: Tensors whose dtype or shape differs, with both.
        tensors: Tensors whose bits differ, in the model's order.
        compared: Tensors that were compared bit by bit.
        facts: Keys of the manifest that differ, with both values; what names the save is left out.
        aux: Files beside the tensors that differ or that only one has.
    """

    only_left: tuple[str, ...]
    only_right: tuple[str, ...]
    reshaped: tuple[tuple[str, str, str], ...]
    tensors: tuple[TensorDiff, ...]
    compared: int
    facts: tuple[tuple[str, JsonValue, JsonValue], ...]
    aux: tuple[str, ...]

    @property
    def is_empty(self) -> bool:
        """Whether both hold the same state: tensors, facts and files."""
        changed = (self.only_left, self.only_right, self.reshaped, self.tensors)
        return not any((*changed, self.facts, self.aux))

    def to_json(self) -> dict[str, object]:
        """As JSON values."""
        return asdict(self) | {"equal": self.is_empty}


def compare(left: OpenCheckpoint, right: OpenCheckpoint, threads: int) -> Difference:
    """Read both checkpoints whole and compare them, tensor by tensor.

    Raises:
        CorruptError: A file cannot be read, is cut short, or has no tensors and is damaged.
    """
    for checkpoint in (left, right):  # of these files the manifests' hashes are compared
        checkpoint.check_aux()
    lefts, rights = _tensors(left), _tensors(right)
    both = [name for name in lefts if name in rights]
    reshaped = [
        (name, _form(lefts[name][1]), _form(rights[name][1]))
        for name in both
        if _form(lefts[name][1]) != _form(rights[name][1])
    ]
    alike = [name for name in both if name not in {name for name, _, _ in reshaped}]
    found = spread(
        lambda name: _compare_tensor(left, lefts[name], right, rights[name]), alike, threads
    )
    return Difference(
        only_left=tuple(name for name in lefts if name not in rights),
        only_right=tuple(name for name in rights if name not in lefts),
        reshaped=tuple(reshaped),
        tensors=tuple(one for one in found if one is not None),
        compared=len(alike),
        facts=tuple(_facts(left, right)),
        aux=_aux(left, right),
    )


def _tensors(checkpoint: OpenCheckpoint) -> dict[str, tuple[Part, TensorPlace]]:
    parts = checkpoint.manifest.parts
    return {place.name: (part, place) for part in parts for place in part.tensors}


def _form(place: TensorPlace) -> str:
    return f"{place.dtype} {list(place.shape)}"


def _compare_tensor(
    left: OpenCheckpoint,
    at_left: tuple[Part, TensorPlace],
    right: OpenCheckpoint,
    at_right: tuple[Part, TensorPlace],
) -> TensorDiff | None:
    place = at_left[1]
    differing, seen, first = 0, 0, 0
    for one, other in zip(pieces(left, *at_left), pieces(right, *at_right), strict=True):
        unequal = patterns(one) != patterns(other)
        count = int(np.count_nonzero(unequal))
        if count and not differing:
            first = seen + int(np.argmax(unequal))
        differing += count
        seen += one.size
    if not differing:
        return None
    index = tuple(map(int, np.unravel_index(first, place.shape)))
    return TensorDiff(place.name, math.prod(place.shape), differing, index)


def _facts(
    left: OpenCheckpoint, right: OpenCheckpoint
) -> Iterator[tuple[str, JsonValue, JsonValue]]:
    lefts = dict(_leaves(left.manifest.model_dump(mode="json", exclude=set(_IDENTITY))))
    rights = dict(_leaves(right.manifest.model_dump(mode="json", exclude=set(_IDENTITY))))
    for key in sorted(lefts.keys() | rights.keys()):
        if lefts.get(key) != rights.get(key):
            yield key, lefts.get(key), rights.get(key)


def _leaves(value: JsonValue, key: str = "") -> Iterator[tuple[str, JsonValue]]:
    """Dotted keys and what they hold; lists are values."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else name)
    else:
        yield key, value


def _aux(left: OpenCheckpoint, right: OpenCheckpoint) -> tuple[str, ...]:
    def hashes(checkpoint: OpenCheckpoint) -> dict[str, str]:
        return {file.file: file.xxh3_128 for file in checkpoint.manifest.aux}

    lefts, rights = hashes(left), hashes(right)
    return tuple(n for n in sorted(lefts.keys() | rights.keys()) if lefts.get(n) != rights.get(n))
