"""Other dtypes than the stored one are made from the FP32 masters, exactly or rounded once."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from megatrain_cli.errors import IncompatibleError, NumericsError
from tests.checkpoint.exporting import left, refused, run_export, same_bits
from tests.checkpoint.made import make_checkpoint, random_layers

TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize(
    ("master", "weights"),
    [("fp32_split", "BF16"), ("fp32", "BF16"), ("bf16", "BF16"), ("fp32", "F32")],
)
def test_other_dtypes_are_made_of_the_masters_and_rounded_once(
    tmp_path: Path, master: str, weights: str, dtype: str
) -> None:
    layers = random_layers()
    make_checkpoint(tmp_path / "x", layers, master=master, weights=weights)
    run_export(tmp_path / "x", tmp_path / "out", dtype=dtype)
    stored: dict[str, torch.Tensor] = {}
    for path in (tmp_path / "x").glob("model-*.safetensors"):
        with safe_open(path, "pt") as file:
            stored |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    exact = master == "fp32_split" or weights == "F32"
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        for values in layers.values():
            for name, value in values.items():
                best = torch.from_numpy(value) if exact else stored[name]
                wanted = best.to(torch.float32).to(TORCH[dtype])
                if dtype == "BF16" and weights == "BF16":
                    wanted = stored[name]  # as they are: a tie of the master is no matter
                assert same_bits(file.get_tensor(name), wanted), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {"dtype": {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}[dtype]}


def test_values_that_half_precision_cannot_hold_are_refused_by_name(tmp_path: Path) -> None:
    layers = random_layers()
    layers["head"]["model.norm.weight"][2] = 1e6
    make_checkpoint(tmp_path / "x", layers)
    with pytest.raises(NumericsError, match=r"model\.norm\.weight has 1 value"):
        run_export(tmp_path / "x", tmp_path / "out", dtype="F16")
    assert left(tmp_path) == ["x"]


def test_a_number_format_that_nobody_trains_is_not_exported(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "x", weights="F64")
    refused(IncompatibleError, "is stored as F64", tmp_path, dtype="F32")
