"""Manifests that are whole but impossible: each rule refuses, and says what is wrong."""

from collections.abc import Callable
from typing import Any

import pytest

from megatrain_cli.checkpoint import shards
from megatrain_cli.checkpoint.manifest import Created, Facts, Manifest
from megatrain_cli.errors import CorruptError
from tests.checkpoint.made import make_checkpoint, make_facts, random_layers
from tests.checkpoint.signed import Json, changed

Change = Callable[[Json], object]


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Manifest]:
    """With none and two of three layers that an update is pending for."""
    folder, layers = tmp_path_factory.mktemp("run"), random_layers(layers=1)
    return {
        pending: make_checkpoint(folder / f"{pending}", layers, pending=pending)
        for pending in (0, 2)
    }


def part(value: Json, shard: int = 0, number: int = 0) -> Json:
    found: Json = value["shards"][shard]["parts"][number]
    return found


def tensor(value: Json, shard: int = 0, number: int = 0) -> list[Any]:
    found: list[Any] = part(value, shard, number)["tensors"][0]
    return found


def grow(value: Json, num_bytes: int) -> Json:
    part(value)["bytes"] += num_bytes
    value["bytes_total"] += num_bytes
    return value


IMPOSSIBLE: dict[str, tuple[Change, str]] = {
    "a missing key": (lambda v: v.pop("step"), "step: Field required"),
    "a text for a number": (lambda v: v.update(step="3"), "step: Input should be a valid integer"),
    "a truth value for a number": (lambda v: v.update(attempt=True), "attempt: "),
    "a negative number": (lambda v: v.update(target_steps=-1), "target_steps: "),
    "a run id that is a path": (lambda v: v.update(run_id="../x"), "run_id: "),
    "a parent that is no id": (lambda v: v.update(parent="sha256:12"), "parent: "),
    "a hash of another length": (lambda v: part(v).update(xxh3_128="ab"), "xxh3_128: "),
    "a decimal float": (lambda v: v.update(losses_tail=["2.5"]), "losses_tail"),
    "a float's other spelling": (lambda v: v.update(losses_tail=["0x1.0p+0"]), "float.hex"),
    "an infinite float": (lambda v: v.update(losses_tail=["0x1.0p+9999"]), "float.hex"),
    "a path out of the folder": (
        lambda v: part(v).update(file="../model-x.safetensors"), "file: "),
    "an absolute path": (lambda v: part(v).update(file="/model-x.safetensors"), "file: "),
    "a hidden file": (lambda v: v["aux"][0].update(file=".config"), "file: "),
    "a deeper folder": (lambda v: v["aux"][0].update(file="training/x/y"), "file: "),
    "a shard among the aux files": (
        lambda v: v["aux"][0].update(file="x.SafeTensors"), "cannot be among the aux"),
    "the manifest among its files": (
        lambda v: v["aux"][0].update(file="Manifest.json"), "cannot be among the aux"),
    "no config": (lambda v: v["aux"][0].update(file="config.txt"), "no config.json"),
    "optimizer state where others look for weights": (
        lambda v: part(v, 0, 1).update(file="model-x.safetensors"), "cannot hold optim"),
    "weights out of sight": (
        lambda v: part(v).update(file="training/x.safetensors"), "cannot hold weights"),
    "a file twice": (
        lambda v: part(v).update(file=part(v, 1)["file"]), "file model-.* occurs twice"),
    "two files that differ in case": (
        lambda v: v["aux"][1].update(file="CONFIG.json"), "file CONFIG.json occurs twice"),
    "an unaligned payload": (
        lambda v: (part(v).update(data_start=4095), grow(v, -1)), "cannot begin at 4095"),
    "a payload at 0": (
        lambda v: (part(v).update(data_start=0), grow(v, -4096)), "cannot begin at 0"),
    "a header of terabytes": (
        lambda v: (part(v).update(data_start=1 << 40), grow(v, (1 << 40) - 4096)),
        "cannot begin at"),
    "a payload longer than the tensors": (lambda v: grow(v, 1), "its tensors have"),
    "an unknown dtype": (lambda v: tensor(v).__setitem__(1, "F33"), "unknown dtype 'F33'"),
    "another dtype's size": (lambda v: tensor(v).__setitem__(1, "F32"), "needs .* bytes and has"),
    "a negative size": (lambda v: tensor(v).__setitem__(2, [-16, -8]), "no possible shape"),
    "an overflowing shape": (
        lambda v: tensor(v).__setitem__(2, [1 << 63, 1 << 63]), "no possible shape"),
    "a shape of a thousand sizes": (
        lambda v: tensor(v).__setitem__(2, [1] * 1000), "no possible shape"),
    "an overlap": (
        lambda v: (tensor(v).__setitem__(3, 1), tensor(v).__setitem__(4, 257)), "begins at byte 1"),
    "a tensor of too few facts": (lambda v: tensor(v).pop(), "tensors.0"),
    "a reserved name": (lambda v: tensor(v).__setitem__(0, "__metadata__"), "is reserved"),
    "a tensor twice in a part": (
        lambda v: part(v, 1)["tensors"][1].__setitem__(0, tensor(v, 1)[0]), "occurs twice"),
    "a weight in two shards": (
        lambda v: [
            place.__setitem__(0, place[0].replace("layers.0.mlp.up_proj", "embed_tokens"))
            for one in v["shards"][1]["parts"] for place in one["tensors"]],
        "a weight is in two shards"),
    "state of no weight": (
        lambda v: tensor(v, 0, 1).__setitem__(0, "exp_avg.other"), "fits no weight"),
    "a gradient among optimizer state": (
        lambda v: tensor(v, 0, 1).__setitem__(0, "grad.model.embed_tokens.weight"), "wrong part"),
    "no shards": (lambda v: v.update(shards=[]), "not numbered"),
    "shards in another order": (lambda v: v["shards"].reverse(), "not numbered"),
    "a shard twice": (
        lambda v: v["shards"][1].update(name="embed"), "shard embed occurs twice"),
    "a shard without optimizer state": (
        lambda v: v["shards"][0]["parts"].pop(), "wanted weights, optim"),
    "a torn save": (lambda v: v["shards"][1].update(layer_step=2), "layer-00000 is at step 2"),
    "a step that no layer is at": (lambda v: v.update(step=4), "not the largest layer_step"),
    "another model's size": (
        lambda v: v["model"].update(num_parameters=1), "parameters, the model has 1"),
    "a wrong sum": (lambda v: v.update(bytes_total=1), "not the sum"),
    "pending without gradients": (
        lambda v: v.update(pending={"step": 4, "learning_rate": "0x0.0p+0", "grad_scale":
                                    "0x0.0p+0"}), "its update is pending"),
    "a required feature for nothing": (
        lambda v: v["format"].update(required_features=["grads"]), "if and only if"),
}  # fmt: skip


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_an_impossible_manifest_is_refused(manifests: dict[int, Manifest], case: str) -> None:
    change, reason = IMPOSSIBLE[case]
    with pytest.raises(CorruptError, match=f"^x/m: not a possible manifest: .*{reason}") as caught:
        Manifest.from_bytes(changed(manifests[0], change), "x/m")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 700


PENDING: dict[str, tuple[Change, str]] = {
    "gradients, and nothing pending": (
        lambda v: (v.update(pending=None), [s.update(layer_step=3) for s in v["shards"]]),
        "its update is pending"),
    "an update long past": (lambda v: v["pending"].update(step=9), "embed is at step 3, possible"),
    "a layer two steps behind": (
        lambda v: v["shards"][1].update(layer_step=1), "layer-00000 is at step 1"),
    "a layer that was not told": (
        lambda v: (v["shards"][0].update(layer_step=2), v.update(step=2)), "its update is pending"),
    "gradients that are not required": (
        lambda v: v["format"].update(required_features=[]), "if and only if"),
    "gradients of too few weights": (
        lambda v: (
            part(v, 2, 2)["tensors"].pop(), part(v, 2, 2).update(bytes=4096 + 16),
            v.update(bytes_total=v["bytes_total"] - 256)),
        "not one gradient for each weight"),
    "state among gradients": (
        lambda v: tensor(v, 2, 2).__setitem__(0, "exp_avg.model.norm.weight"), "wrong part"),
    "everybody had it": (
        lambda v: (
            [shard.update(layer_step=3) for shard in v["shards"]],
            [shard["parts"].pop() for shard in v["shards"][1:]]),
        "no shard has gradients"),
}  # fmt: skip


@pytest.mark.parametrize("case", PENDING)
def test_an_impossible_pending_update_is_refused(manifests: dict[int, Manifest], case: str) -> None:
    change, reason = PENDING[case]
    with pytest.raises(CorruptError, match=reason):
        Manifest.from_bytes(changed(manifests[2], change))


def test_an_update_may_be_pending_for_all_layers(manifests: dict[int, Manifest]) -> None:
    def all_behind(value: Json) -> None:
        value["step"] = 2
        first = value["shards"][0]
        first["layer_step"] = 2
        grads = part(value, 0, 0) | {"part": "grads", "file": "training/grads-embed.safetensors"}
        grads["tensors"] = [[f"grad.{tensor(value)[0]}", *tensor(value)[1:]]]
        first["parts"].append(grads)
        value["bytes_total"] += grads["bytes"]

    read = Manifest.from_bytes(changed(manifests[2], all_behind))
    assert all(shard.has_grads for shard in read.shards)


def test_more_tensors_than_the_limit_are_refused(
    manifests: dict[int, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:  # F44
    raw = manifests[0].to_bytes()
    number = sum(len(part.tensors) for part in manifests[0].parts)
    monkeypatch.setattr(shards, "MAX_TENSORS", number)
    Manifest.from_bytes(raw)
    monkeypatch.setattr(shards, "MAX_TENSORS", number - 1)
    with pytest.raises(CorruptError, match=f"more than {number - 1} tensors"):
        Manifest.from_bytes(raw)


def test_what_cannot_be_read_back_is_not_built(manifests: dict[int, Manifest]) -> None:
    whole = manifests[0]
    with pytest.raises(ValueError, match="is at step 3, possible is"):
        Manifest.build(
            Facts.model_validate(dict(make_facts(random_layers(layers=1), step=4))),
            save_id="x",
            created=Created(unix_ns=0, megatrain="0"),
            shards=[whole.shards[0].model_copy(update={"layer_step": 4}), *whole.shards[1:]],
            aux=whole.aux,
        )
