"""Runs that save and go on, on a device: the same tests on a GPU and, smaller, on the CPU."""

import io
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
import yaml
from rich.console import Console

from megatrain_cli.config.load import load_config
from megatrain_cli.report.console import RunConsole
from megatrain_cli.train.resume import ResumeRequest
from megatrain_cli.train.session import resume, train
from tests.checkpoint.tiles import manifest_of
from tests.families import tiny_config
from tests.torch_settings import settings_put_back
from tests.train.workspace import make_workspace, one_thread

# Qwen2.5-0.5B.
HALF_B: dict[str, Any] = {
    "layers": 24,
    "hidden": 896,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "initializer_range": 0.02,
}
TINY: dict[str, Any] = {"layers": 3, "hidden": 16}

Losses = list[str]
State = dict[str, str]


@dataclass(frozen=True)
class Place:
    """A device, and a workspace for it.

    Attributes:
        config: Of all runs: rows in a new order each epoch, BF16 with split masters, not compiled,
            bit for bit.
    """

    device: str
    config: Path

    @property
    def on_gpu(self) -> bool:
        """Whether it is a real GPU."""
        return self.device == "cuda"

    def train(self, name: str, *overrides: str) -> Path:
        """A run from its first step to its last; its folder."""
        with self._alone() as console:
            train(load_config(self.config, [f"train.output_dir={name}", *overrides]), console)
        return self.config.parent / name

    def resume(self, path: Path, steps: int | None = None, fork: Path | None = None) -> str:
        """Go on up to a step; what was said."""
        with self._alone() as console:
            resume(ResumeRequest(path, steps=steps, fork=fork), console)
            return console.said

    @contextmanager
    def _alone(self) -> Iterator["_Heard"]:
        with settings_put_back(), nullcontext() if self.on_gpu else one_thread():
            yield _Heard()


class _Heard(RunConsole):
    def __init__(self) -> None:
        self._file = io.StringIO()
        super().__init__(Console(file=self._file, width=10_000))

    @property
    def said(self) -> str:
        return self._file.getvalue()


def make_place(folder: Path, device: str) -> Place:
    """Write a workspace whose weights are random, so that none are stored."""
    on_gpu = device == "cuda"
    config = make_workspace(
        folder,
        "qwen2",
        tied=True,
        data={"shuffle": True},
        train={"max_steps": 20, "micro_batch_size": 4, "seed": 3},
        model={"layers": 1, "hidden": 16},
        optimizer={"master": "fp32_split", "learning_rate": 1e-4, "threads": "auto"},
        pipeline={"device": device, "compile": False},
        checkpoint={"keep_last": 1},
    )
    written = yaml.safe_load(config.read_text())
    written["model"] |= {"dtype": "bfloat16", "init": "random"}
    if on_gpu:  # it has no effect elsewhere, and that is refused
        written["train"]["deterministic"] = True
    config.write_text(yaml.safe_dump(written))
    (folder / "model" / "model.safetensors").unlink()
    shape = HALF_B if on_gpu else TINY
    tiny_config("qwen2", tied=True, **shape).save_pretrained(folder / "model")
    return Place(device, config)


def losses_of(run: Path, first: int = 1) -> Losses:
    """Of all steps from the first of the folder on, hexadecimal; the journal has each once."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(first, first + len(records)))
    return [float(record["loss"]).hex() for record in records]


def state_of(run: Path, step: int) -> State:
    """A hash of the tensors of each file of a checkpoint: weights, masters and moments."""
    folder = step_folder(run, step)
    found = {}
    for part in manifest_of(folder).parts:
        digest = xxhash.xxh3_128()
        with (folder / part.file).open("rb") as file:
            file.seek(part.data_start)
            while chunk := file.read(16 << 20):
                digest.update(chunk)
        found[part.file] = digest.hexdigest()
    return found


def step_folder(run: Path, step: int) -> Path:
    """Of a checkpoint."""
    return run / "checkpoints" / f"step-{step:08d}"


def flip_byte(path: Path) -> None:
    """Damage a file in its middle."""
    with path.open("r+b") as file:
        middle = path.stat().st_size // 2
        file.seek(middle)
        byte = file.read(1)[0]
        file.seek(middle)
        file.write(bytes([byte ^ 1]))


def clear(place: Place) -> None:
    """Remove all runs: a few of them fill a disk."""
    for path in place.config.parent.iterdir():
        if path.is_dir() and path.name != "model":
            shutil.rmtree(path)
