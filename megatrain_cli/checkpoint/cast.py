"""A checkpoint's weights in the dtype that somebody wants, made from its masters where it has any.

An FP32 master is given exactly, and rounded once to anything smaller. Weights that are stored in
the wanted dtype are given as they are.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megatrain_cli.checkpoint.elements import F32, FLOATS, Bits, master_values, nearest_bf16, widen
from megatrain_cli.checkpoint.folder import OpenCheckpoint
from megatrain_cli.checkpoint.manifest import Part, Shard
from megatrain_cli.checkpoint.pieces import pieces
from megatrain_cli.checkpoint.places import ITEM_BYTES, TensorPlace, short
from megatrain_cli.errors import IncompatibleError, NumericsError
from megatrain_cli.units import show_number


@dataclass(frozen=True)
class CastWeight:
    """A weight to give in `dtype`.

    Attributes:
        dtype: Wanted, one of `FLOATS`.
        part: Where the weight is stored.
        place: Where in it.
        master: Part and place of what makes it exact; None if the weight itself is the source.
    """

    dtype: str
    part: Part
    place: TensorPlace
    master: tuple[Part, TensorPlace] | None

    @property
    def name(self) -> str:
        """Hugging Face's name."""
        return self.place.name

    @property
    def num_bytes(self) -> int:
        """In the wanted dtype."""
        return self.place.numel * ITEM_BYTES[self.dtype]

    @property
    def files(self) -> set[str]:
        """Files of the checkpoint that are read for it."""
        # A remainder says nothing without its weight; a whole master says all.
        return {self.part.file} | ({self.master[0].file} if self.master else set())


def cast_weights(checkpoint: OpenCheckpoint, dtype: str) -> tuple[CastWeight, ...]:
    """Every weight of a checkpoint, in the model's order, to be given in `dtype`.

    Raises:
        IncompatibleError: A weight is stored as something else than BF16, F16 or F32.
    """
    found = []
    for shard in checkpoint.manifest.shards:
        for place in shard.weights.tensors:
            if place.dtype not in FLOATS:
                raise IncompatibleError(
                    f"{checkpoint.folder}: {short(place.name)} is stored as {place.dtype}, which "
                    "is no number format of a trained weight."
                )
            master = None if place.dtype == dtype else _master(shard, place.name)
            found.append(CastWeight(dtype, shard.weights, place, master))
    return tuple(found)


def cast_pieces(checkpoint: OpenCheckpoint, weight: CastWeight) -> Iterator[Bits]:
    """The weight in its wanted dtype, flat, piece by piece; BF16 as `uint16`.

    Raises:
        CorruptError: A file cannot be read.
        NumericsError: A value is too large for F16.
    """
    own = pieces(checkpoint, weight.part, weight.place)
    if weight.place.dtype == weight.dtype:
        yield from own
        return
    if weight.master is None:
        values = (widen(weight.place.dtype, bits) for bits in own)
    else:
        beside = pieces(checkpoint, *weight.master)
        values = (master_values(bits, other) for bits, other in zip(own, beside, strict=True))
    for piece in values:
        if weight.dtype == "F32":
            yield piece
        elif weight.dtype == "BF16":
            yield nearest_bf16(piece)
        else:
            yield _as_f16(piece, weight.name)


def _master(shard: Shard, name: str) -> tuple[Part, TensorPlace] | None:
    wanted = (f"master_lo.{name}", f"master.{name}")
    entries = ((part, place) for part in shard.parts for place in part.tensors)
    return next((entry for entry in entries if entry[1].name in wanted), None)


def _as_f16(values: F32, name: str) -> Bits:
    with np.errstate(over="ignore"):
        small = values.astype(np.float16)
    lost = int(np.count_nonzero(np.isinf(small) & np.isfinite(values)))
    if lost:
        raise NumericsError(
            f"{name} has {show_number(lost, 'value')} that FP16 cannot hold (its largest is "
            "65504). Export as bf16 or fp32."
        )
    return small
