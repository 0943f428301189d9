"""`--numerics`: what each value is like; whatever must not be is told, and nothing else is."""

from pathlib import Path

import numpy as np
import pytest

from megatrain_cli.checkpoint import pieces as pieces_module
from megatrain_cli.checkpoint.folder import open_checkpoint
from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.checkpoint.inspect import inspect_checkpoint
from megatrain_cli.checkpoint.numerics import TensorNumbers, measure
from tests.checkpoint.made import F32, make_checkpoint, random_layers

NORM = "model.layers.1.input_layernorm.weight"


def numbers(folder: Path) -> dict[str, TensorNumbers]:
    with open_checkpoint(folder, FileSystem()) as checkpoint:
        return {one.name: one for one in measure(checkpoint, threads=2)}


def poke(folder: Path, name: str, index: int, raw: bytes) -> None:
    """Change an element in place; no hash is made right."""
    with open_checkpoint(folder, FileSystem()) as checkpoint:
        part, place = next(
            (part, place)
            for part in checkpoint.manifest.parts
            for place in part.tensors
            if place.name == name
        )
    with (folder / part.file).open("r+b") as file:
        file.seek(part.data_start + place.start + index * len(raw))
        file.write(raw)


def bf16(value: float) -> bytes:
    bits = int(np.float32(value).view(np.uint32)) >> 16
    return bits.to_bytes(2, "little")


@pytest.mark.parametrize("size", [1 << 22, 5])
@pytest.mark.parametrize(
    ("master", "weights"),
    [("fp32_split", "BF16"), ("fp32", "BF16"), ("bf16", "BF16"), ("fp32", "F32")],
)
def test_every_tensor_is_measured_by_its_values_in_pieces_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, master: str, weights: str, size: int
) -> None:
    monkeypatch.setattr(pieces_module, "PIECE", size)
    layers = random_layers()
    make_checkpoint(tmp_path / "x", layers, master=master, weights=weights)
    found = numbers(tmp_path / "x")
    values = {name: value for layer in layers.values() for name, value in layer.items()}
    assert {one.removeprefix("exp_avg_sq.") for one in found if one.startswith("exp_avg_sq.")} == (
        values.keys()
    )
    for name, value in values.items():
        square: F32 = value * value
        one = found[f"exp_avg_sq.{name}"].statistics
        assert (one.count, one.smallest, one.largest) == (value.size, square.min(), square.max())
        exact = found.get(f"master.{name}")
        assert (exact is not None) == (weights == "BF16" and master != "bf16")
        if master == "fp32_split":
            assert exact is not None
            assert exact.statistics.smallest == value.min()  # exactly: remainders were added
            assert exact.statistics.largest == value.max()
        assert found[name].faults == ()
        mean = float(np.abs(value).mean(dtype=np.float64))
        assert np.isclose(found[name].statistics.mean_magnitude, mean, rtol=2**-8)
    assert not any(one.faults for one in found.values())


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_weights_that_are_not_finite_are_told_with_tensor_and_count(
    tmp_path: Path, value: str
) -> None:
    make_checkpoint(tmp_path / "x", master="bf16")
    poke(tmp_path / "x", NORM, 3, bf16(float(value)))
    poke(tmp_path / "x", NORM, 5, bf16(float(value)))
    found = inspect_checkpoint(tmp_path / "x", FileSystem(), numerics=True)
    assert found.exit_code == 8
    (problem,) = found.problems
    assert NORM in str(problem)
    assert ("2 NaN and 0 inf" if value == "nan" else "0 NaN and 2 inf") in str(problem)


def test_a_finite_weight_whose_master_is_none_is_told(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "x")
    poke(tmp_path / "x", NORM, 2, bf16(0.0))  # with a remainder below zero: the bits of a NaN
    poke(tmp_path / "x", f"master_lo.{NORM}", 2, np.int16(-1).tobytes())
    found = numbers(tmp_path / "x")
    assert found[NORM].faults == ()
    assert found[f"master.{NORM}"].faults == ("1 NaN and 0 infinite values of 8",)


def test_negative_second_moments_are_told(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "x")
    poke(tmp_path / "x", f"exp_avg_sq.{NORM}", 0, np.float32(-1).tobytes())
    found = numbers(tmp_path / "x")
    told = [(name, fault) for name, one in found.items() for fault in one.faults]
    assert told == [(f"exp_avg_sq.{NORM}", "1 of 8 second moments are negative")]


def test_a_weight_that_is_not_its_rounded_master_is_told(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "x", master="fp32")
    poke(tmp_path / "x", f"master.{NORM}", 4, np.float32(1 + 2**-8).tobytes())
    poke(tmp_path / "x", NORM, 4, bf16(1.0))  # a tie: the even neighbour, as the optimizer rounds
    assert numbers(tmp_path / "x")[NORM].faults == ()
    poke(tmp_path / "x", NORM, 4, bf16(1 + 2**-7))
    assert numbers(tmp_path / "x")[NORM].faults == (
        "1 of 8 BF16 weights are not their master rounded",
    )


def test_zeros_are_remarked_and_no_fault(tmp_path: Path) -> None:
    layers = random_layers()
    layers["head"]["model.norm.weight"][:] = 0
    make_checkpoint(tmp_path / "x", layers)
    one = numbers(tmp_path / "x")["model.norm.weight"]
    assert one.faults == ()
    assert one.texts[-1] == "all zero"


def test_pending_gradients_are_measured_too(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "x", pending=1)
    assert "grad.lm_head.weight" in numbers(tmp_path / "x")


def test_infinite_ranges_are_json(tmp_path: Path) -> None:
    import json

    make_checkpoint(tmp_path / "x")
    for index in range(8):
        poke(tmp_path / "x", NORM, index, bf16(float("nan")))
    found = inspect_checkpoint(tmp_path / "x", FileSystem(), numerics=True).to_json()
    numerics = json.loads(json.dumps(found, allow_nan=False))["numerics"]
    assert next(one for one in numerics if one["name"] == NORM)["min"] == "inf"
