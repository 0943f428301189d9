"""Small valid checkpoints, made of NumPy bytes without a model, a run or torch."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatrain_cli.checkpoint.facts import DataFacts, Facts, ModelFacts, Pending
from megatrain_cli.checkpoint.headers import INDEX_NAME, make_padded_header
from megatrain_cli.checkpoint.manifest import Created, Manifest
from megatrain_cli.checkpoint.places import TensorPlace
from megatrain_cli.checkpoint.shards import AuxFile, Part, PartName, Shard

F32 = NDArray[np.float32]
Layers = Mapping[str, Mapping[str, F32]]

_NAMES = {"float32": "F32", "uint16": "BF16", "int16": "I16"}


def random_layers(seed: int = 0, layers: int = 2) -> dict[str, dict[str, F32]]:
    """FP32 masters of an embedding, a few layers and a head, by layer and weight."""
    draw = np.random.default_rng(seed)

    def values(*shape: int) -> F32:
        return draw.normal(size=shape).astype(np.float32)

    found = {"embed": {"model.embed_tokens.weight": values(16, 8)}}
    for number in range(layers):
        prefix = f"model.layers.{number}"
        found[f"layer-{number:05d}"] = {
            f"{prefix}.mlp.up_proj.weight": values(12, 8),
            f"{prefix}.input_layernorm.weight": values(8),
        }
    found["head"] = {"model.norm.weight": values(8), "lm_head.weight": values(16, 8)}
    return found


def make_checkpoint(
    folder: Path,
    layers: Layers | None = None,
    *,
    master: str = "fp32_split",
    weights: str = "BF16",
    step: int = 3,
    pending: int = 0,
    aux: Mapping[str, bytes] | None = None,
    **changes: object,
) -> Manifest:
    """Write a checkpoint and return its manifest.

    Args:
        folder: To make; also its parents.
        layers: FP32 masters by layer and weight, in the model's order.
        master: `fp32_split`, `fp32` or `bf16`.
        weights: `BF16`, or `F32` without masters.
        step: Optimizer steps completed.
        pending: How many layers, from the last, still need the update of `step`. If all do,
            the checkpoint's own step is the one before.
        aux: Files beside `config.json` and the index, or in their place.
        changes: Other facts than the usual, such as `run_id`, `attempt` or `losses_tail`.
    """
    layers = layers or random_layers()
    (folder / "training").mkdir(parents=True)
    shards: list[Shard] = []
    places: dict[str, str] = {}
    for index, (name, values) in enumerate(layers.items()):
        due = index >= len(layers) - pending
        metadata = {"format": "pt", "megatrain.shard": name, "megatrain.step": f"{step}"}
        file = f"model-{name}.safetensors"
        tensors = {weight: _weight(value, weights) for weight, value in values.items()}
        parts = [_write(folder, "weights", file, tensors, metadata)]
        places |= dict.fromkeys(tensors, file)
        optim = _optimizer(values, master if weights == "BF16" else "bf16", step)
        parts.append(_write(folder, "optim", f"training/optim-{name}.safetensors", optim, metadata))
        if due:
            grads = {f"grad.{weight}": value for weight, value in tensors.items()}
            file = f"training/grads-{name}.safetensors"
            parts.append(_write(folder, "grads", file, grads, metadata))
        layer_step = step - 1 if due else step
        shards.append(Shard(name=name, index=index, layer_step=layer_step, parts=tuple(parts)))
    index_text = json.dumps({"metadata": {}, "weight_map": places})
    files = {"config.json": b"{}", INDEX_NAME: index_text.encode()} | dict(aux or {})
    entries = [_write_aux(folder, name, raw) for name, raw in files.items()]
    facts = make_facts(layers, master=master, weights=weights, step=step, pending=bool(pending))
    if pending == len(layers):
        changes = {"step": step - 1} | changes
    manifest = Manifest.build(
        Facts.model_validate(dict(facts) | changes),
        save_id=f"save-{step}",
        created=Created(unix_ns=0, megatrain="0"),
        shards=shards,
        aux=entries,
    )
    (folder / "manifest.json").write_bytes(manifest.to_bytes())
    return manifest


def make_facts(
    layers: Layers, *, master: str = "fp32_split", weights: str = "BF16", step: int = 3,
    pending: bool = False,
) -> Facts:  # fmt: skip
    """What a small run would tell about itself."""
    numel = sum(value.size for values in layers.values() for value in values.values())
    update = Pending(step=step, learning_rate=(1e-3).hex(), grad_scale=(0.5).hex())
    return Facts(
        run_id="run-1",
        attempt=1,
        parent=None,
        step=step,
        finished=False,
        target_steps=20,
        pending=update if pending else None,
        model=ModelFacts(
            architecture="LlamaForCausalLM",
            config_sha256="0" * 64,
            num_layers=len(layers) - 2,
            num_parameters=numel,
            vocab_size=16,
            tied=(),
        ),
        dtypes={"weights": weights, "master": master, "exp_avg": "F32", "exp_avg_sq": "F32"},
        optimizer={"name": "adamw"},
        schedule={"type": "constant"},
        data=DataFacts(
            rows_xxh3_128="0" * 32,
            num_rows=100,
            sources=(),
            order="hashed-v1",
            seed=1,
            shuffle=True,
            next_row=4 * step,
            rows_per_step=4,
        ),
        numerics={"torch": "2.11.0"},
        plan={"update": "deferred"},
        losses_tail=((2.5).hex(), (2.25).hex()),
        changes=(),
    )


def split(values: F32) -> tuple[NDArray[np.uint16], NDArray[np.int16]]:
    """BF16 bit patterns, ties away from zero, and remainders; finite values only."""
    bits = values.view(np.uint32)
    high = (bits + np.uint32(0x8000)) >> np.uint32(16)
    return high.astype(np.uint16), (bits - (high << np.uint32(16))).astype(np.int16)


def _weight(values: F32, dtype: str) -> NDArray[np.generic]:
    return split(values)[0] if dtype == "BF16" else values


def _optimizer(values: Mapping[str, F32], master: str, step: int) -> dict[str, NDArray[np.generic]]:
    found: dict[str, NDArray[np.generic]] = {}
    for weight, value in values.items():
        if master == "fp32_split":
            found[f"master_lo.{weight}"] = split(value)[1]
        if master == "fp32":
            # Its nearest BF16, so that ties do not matter here.
            found[f"master.{weight}"] = (split(value)[0].astype(np.uint32) << 16).view(np.float32)
    for weight, value in values.items():
        found[f"exp_avg.{weight}"] = value * np.float32(step / 8)
    for weight, value in values.items():
        found[f"exp_avg_sq.{weight}"] = value * value
    return found


def _write(
    folder: Path,
    part: PartName,
    file: str,
    tensors: Mapping[str, NDArray[np.generic]],
    metadata: Mapping[str, str],
) -> Part:
    places, end = [], 0
    for name, value in tensors.items():
        start, end = end, end + value.nbytes
        places.append(TensorPlace(name, _NAMES[value.dtype.name], value.shape, start, end))
    head = make_padded_header(places, metadata)
    raw = head + b"".join(value.tobytes() for value in tensors.values())
    (folder / file).write_bytes(raw)
    return Part(
        part=part,
        file=file,
        bytes=len(raw),
        data_start=len(head),
        xxh3_128=xxhash.xxh3_128_hexdigest(raw),
        tensors=tuple(places),
    )


def _write_aux(folder: Path, name: str, raw: bytes) -> AuxFile:
    (folder / name).write_bytes(raw)
    return AuxFile(file=name, bytes=len(raw), xxh3_128=xxhash.xxh3_128_hexdigest(raw))
