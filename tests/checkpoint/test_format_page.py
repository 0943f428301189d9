"""docs/checkpoint-format.md: its programs work as they stand, and its tables are complete."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatrain_cli.checkpoint.manifest import Manifest, Pending, Shard
from tests.checkpoint.made import make_checkpoint, random_layers, split

PAGE = (Path(__file__).parents[2] / "docs" / "checkpoint-format.md").read_text(encoding="utf-8")


def program(word: str, language: str) -> str:
    found: list[str] = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return next(one for one in found if word in one)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    layers = random_layers(layers=1)
    make_checkpoint(tmp_path / "c", layers, pending=1, plan={"é\n\x7f\U0001f600": "/"})
    return tmp_path / "c"


def run(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", text], cwd=folder, capture_output=True, text=True, check=False
    )


def test_the_program_for_the_id_accepts_a_manifest_and_refuses_another(folder: Path) -> None:
    text = program("manifest_sha256", "python")
    assert run(text, folder).returncode == 0
    raw = (folder / "manifest.json").read_bytes()
    (folder / "manifest.json").write_bytes(raw.replace(b'"finished":false', b'"finished":true'))
    assert "AssertionError" in run(text, folder).stderr


def test_the_program_for_the_hashes_lists_every_file(folder: Path) -> None:
    text = re.search(r"python3 -c '\n(.*?)' \| xxh128sum --check", PAGE, re.DOTALL)
    assert text is not None
    manifest = Manifest.from_bytes((folder / "manifest.json").read_bytes())
    listed = run(text[1], folder).stdout.splitlines()
    assert listed == [f"{file.xxh3_128}  {file.file}" for file in manifest.files]


@pytest.mark.skipif(shutil.which("xxh128sum") is None, reason="xxhsum is not installed")
def test_xxh128sum_verifies_a_checkpoint(folder: Path) -> None:
    script = program("xxh128sum", "sh").split("\n", 1)[1]
    assert subprocess.run(["sh", "-c", script], cwd=folder, check=False).returncode == 0
    raw = bytearray((folder / "model-head.safetensors").read_bytes())
    raw[-1] ^= 1
    (folder / "model-head.safetensors").write_bytes(raw)
    assert subprocess.run(["sh", "-c", script], cwd=folder, check=False).returncode != 0


def test_the_program_for_masters_restores_every_bit(tmp_path: Path) -> None:
    masters = np.random.default_rng(0).normal(size=4096).astype(np.float32)
    masters[:4] = 0.0, -0.0, np.float32(2**-140), -(2**-140)
    bf16, remainder = split(masters)
    np.savez(tmp_path / "x", bf16=bf16, remainder=remainder)
    before = "import numpy as np\nheld = np.load('x.npz')\n"
    before += "bf16, remainder = held['bf16'], held['remainder']\n"
    text = program("remainder.astype", "python")
    done = run(f"{before}{text}\nmaster.tofile('out')", tmp_path)
    assert done.stderr == ""
    assert (tmp_path / "out").read_bytes() == masters.tobytes()


def test_the_table_of_keys_is_complete() -> None:
    section = PAGE.split("## `manifest.json`")[1].split("A shard:")[0]
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", section, re.MULTILINE)
    keys = {key for first, _ in rows for key in re.findall(r"`(\w+)`", first)}
    assert keys == Manifest.model_fields.keys() | {"manifest_sha256"}
    told = {key: set(re.findall(r"`(\w+)`", text)) for first, text in rows
            for key in re.findall(r"`(\w+)`", first)}  # fmt: skip
    for key, field in Manifest.model_fields.items():
        inner = getattr(field.annotation, "model_fields", {})
        assert set(inner) <= told[key] or key == "pending", key


def test_the_examples_of_json_have_every_key() -> None:
    pending = json.loads("{" + program("grad_scale", "json") + "}")["pending"]
    assert Pending.model_validate(pending).step == 1201
    shard = json.loads(program("layer_step", "json"))
    assert shard.keys() == Shard.model_fields.keys()
