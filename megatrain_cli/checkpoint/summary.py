"""What a manifest says, in words: the facts of a checkpoint, and its shards in groups."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from pydantic import JsonValue

from megatrain_cli.checkpoint.manifest import Manifest
from megatrain_cli.checkpoint.places import short
from megatrain_cli.checkpoint.shards import Shard
from megatrain_cli.units import show_bytes, show_count, show_number

_SHOWN_LOSSES = 5
_ID_DIGITS = 12


@dataclass(frozen=True)
class ShardGroup:
    """Shards in a row that are alike in all that is shown of them.

    Attributes:
        names: In the model's order.
        num_parameters: Of each.
        parts: Of each: name of the part, dtypes, bytes on disk.
    """

    names: tuple[str, ...]
    num_parameters: int
    parts: tuple[tuple[str, tuple[str, ...], int], ...]


def shard_groups(manifest: Manifest) -> tuple[ShardGroup, ...]:
    """The shards in order, neighbours of one form as one group."""
    groups: list[ShardGroup] = []
    for shard in manifest.shards:
        one = _group(shard)
        last = groups[-1] if groups else None
        if last and (last.num_parameters, last.parts) == (one.num_parameters, one.parts):
            groups[-1] = ShardGroup(last.names + one.names, one.num_parameters, one.parts)
        else:
            groups.append(one)
    return tuple(groups)


def short_id(checkpoint_id: str) -> str:
    """The beginning of an id: enough to tell the checkpoints of a run apart."""
    return checkpoint_id[: len("sha256:") + _ID_DIGITS]


def facts_in_words(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Label and text, one a line; text from the file is escaped."""
    at = datetime.fromtimestamp(manifest.created.unix_ns / 1e9, tz=UTC)
    yield "id", manifest.id
    done = ", finished" if manifest.finished else ""
    yield "step", f"{manifest.step} of {manifest.target_steps}{done}"
    yield "pending", _pending(manifest)
    yield "run", f"{manifest.run_id}, attempt {manifest.attempt}"
    yield "parent", manifest.parent or "none"
    yield "saved", f"{at:%Y-%m-%d %H:%M:%S} UTC by megatrain {_plain(manifest.created.megatrain)}"
    model, data = manifest.model, manifest.data
    tied = f", tied: {', '.join(map(_plain, model.tied))}" if model.tied else ""
    size = show_count(model.num_parameters)
    yield "model", f"{_plain(model.architecture)}, {size} parameters{tied}"
    kinds = ", ".join(f"{key} {value}" for key, value in manifest.dtypes.items() if value)
    yield "kept as", kinds
    epoch = f" (epoch {data.next_row / data.num_rows:.2f})" if data.num_rows else ""
    order = f"{'shuffled' if data.shuffle else 'in order'}, {data.rows_per_step} a step"
    yield "rows read", f"{data.next_row}{epoch} of {data.num_rows}, {order}"
    losses = [f"{float.fromhex(loss):.6g}" for loss in manifest.losses_tail[-_SHOWN_LOSSES:]]
    yield "last losses", " ".join(losses) or "none"
    if manifest.changes:
        yield "changed", "; ".join(_plain(change_in_words(change)) for change in manifest.changes)
    files = len(tuple(manifest.parts)) + len(manifest.aux)
    yield "files", f"{files}, {show_bytes(manifest.bytes_total)}"


def change_in_words(change: Mapping[str, JsonValue]) -> str:
    """One entry of a lineage: `train.max_steps 100 -> 120 at step 100`."""
    old, new = (_value(change.get(which)) for which in ("old", "new"))
    return f"{change.get('key')} {old} -> {new} at step {change.get('step')}"


def _value(value: JsonValue) -> str:
    """As it stood in the config; floats are kept as hexadecimal texts."""
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, str):
        try:
            return f"{float.fromhex(value):g}" if "0x" in value else value
        except (ValueError, OverflowError):
            return value
    return json.dumps(value)


def _group(shard: Shard) -> ShardGroup:
    parts = tuple(
        (part.part, tuple(sorted({place.dtype for place in part.tensors})), part.bytes)
        for part in shard.parts
    )
    numel = sum(place.numel for place in shard.weights.tensors)
    return ShardGroup((shard.name,), numel, parts)


def _plain(value: object) -> str:
    """Text from a file, escaped and cut, without quotes."""
    return short(value if isinstance(value, str) else str(value), 300)[1:-1]


def _pending(manifest: Manifest) -> str:
    update = manifest.pending
    if update is None:
        return "no"
    due = sum(shard.has_grads for shard in manifest.shards)
    layers = f"{due} of {show_number(len(manifest.shards), 'shard')}"
    return f"the update of step {update.step} in {layers}; resume finishes it"
