"""Whether the numbers of a checkpoint are ones to train on with: what `--numerics` looks at.

A checkpoint can be whole to the last byte and still hold a NaN. Masters are looked at as the FP32
values that they stand for, whichever way they are stored.
"""

from dataclasses import dataclass
from itertools import repeat

import numpy as np

from megatrain_cli.checkpoint.elements import F32, FLOATS, Bits, master_values, nearest_bf16, widen
from megatrain_cli.checkpoint.folder import OpenCheckpoint
from megatrain_cli.checkpoint.manifest import Part, Shard
from megatrain_cli.checkpoint.pieces import pieces, spread
from megatrain_cli.checkpoint.places import TensorPlace
from megatrain_cli.checkpoint.statistics import Statistics

_SPLIT, _WHOLE, _SECOND = "master_lo.", "master.", "exp_avg_sq."

Entry = tuple[Part, TensorPlace]


@dataclass(frozen=True)
class TensorNumbers:
    """What the values of one tensor are like.

    Attributes:
        name: As stored; a master is `master.<weight>` in both ways to store one.
        statistics: Of its values as FP32.
        unrounded: Weights that are not their FP32 master rounded to the nearest BF16.
    """

    name: str
    statistics: Statistics
    unrounded: int = 0

    @property
    def faults(self) -> tuple[str, ...]:
        """What must not be, in words; empty if the tensor is sound."""
        found, bad = self.statistics, []
        if not found.is_finite:
            bad.append(f"{found.nan} NaN and {found.infinite} infinite values of {found.count}")
        if self.name.startswith(_SECOND) and found.negative:
            bad.append(f"{found.negative} of {found.count} second moments are negative")
        if self.unrounded:
            bad.append(
                f"{self.unrounded} of {found.count} BF16 weights are not their master rounded"
            )
        return tuple(bad)

    @property
    def texts(self) -> tuple[str, ...]:
        """Least, greatest and mean magnitude, NaNs, infinities, and a remark, as texts."""
        found = self.statistics
        remark = "; ".join(self.faults) or ("all zero" if found.is_zero else "")
        shown = (found.smallest, found.largest, found.mean_magnitude)
        return (*(f"{x:.4g}" for x in shown), str(found.nan), str(found.infinite), remark)

    def to_json(self) -> dict[str, object]:
        """As JSON values; floats that JSON cannot hold are texts."""
        found = self.statistics
        numbers = {"min": found.smallest, "max": found.largest, "absmean": found.mean_magnitude}
        return {
            "name": self.name,
            "count": found.count,
            "nan": found.nan,
            "inf": found.infinite,
            "negative": found.negative,
            "zero": found.zero,
            "unrounded": self.unrounded,
            **{key: value if np.isfinite(value) else str(value) for key, value in numbers.items()},
            "faults": list(self.faults),
        }


def measure(checkpoint: OpenCheckpoint, threads: int) -> tuple[TensorNumbers, ...]:
    """Look at every value of a checkpoint, shards in parallel.

    Memory in use is a few pieces a thread, whatever the size of a tensor.

    Raises:
        CorruptError: A file cannot be read, or is cut short.
    """
    shards = checkpoint.manifest.shards
    found = spread(lambda shard: _measure_shard(checkpoint, shard), shards, threads)
    return tuple(numbers for shard in found for numbers in shard)


def _measure_shard(checkpoint: OpenCheckpoint, shard: Shard) -> list[TensorNumbers]:
    entries = {place.name: (part, place) for part in shard.parts for place in part.tensors}
    found: list[TensorNumbers] = []
    for name, entry in entries.items():
        if name.startswith((_SPLIT, _WHOLE)):
            continue  # beside its weight
        if entry[1].dtype not in FLOATS:
            continue  # no number format of a trained tensor; `check_dtypes` names it
        master = entries.get(_SPLIT + name) or entries.get(_WHOLE + name)
        found += _measure_tensor(checkpoint, entry, master)
    return found


def _measure_tensor(
    checkpoint: OpenCheckpoint, entry: Entry, master: Entry | None
) -> list[TensorNumbers]:
    (part, place), unrounded = entry, 0
    own, of_master = Statistics(), Statistics()
    masters = repeat(None) if master is None else pieces(checkpoint, *master)
    for bits, beside in zip(pieces(checkpoint, part, place), masters, strict=False):
        values = widen(place.dtype, bits)
        own.add(values)
        if master is None or beside is None:
            continue
        whole = master_values(bits, beside)
        of_master.add(whole)
        if master[1].dtype == "F32":  # of a remainder there is none that does not fit its weight
            unrounded += _count_unrounded(bits, whole)
    found = [TensorNumbers(place.name, own, unrounded)]
    if master is not None:
        found.append(TensorNumbers(_WHOLE + place.name, of_master))
    return found


def _count_unrounded(bits: Bits, master: F32) -> int:
    # A NaN is counted where the statistics count it; which NaN it became is no matter.
    differs = (nearest_bf16(master) != bits) & ~np.isnan(master)
    return int(np.count_nonzero(differs))
