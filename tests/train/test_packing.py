"""Packed training is the training of the same documents, each alone in a row."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.workspace import Started, make_workspace, start

PACKED = ["data.packing=true"]
# One step over all rows, packed or not: 12 documents of 30 to 64 tokens.
ONE_STEP = {"max_steps": 1, "micro_batch_size": 12}


@contextmanager
def begun(folder: Path, kind: str, overrides: list[str], **model: Any) -> Iterator[Started]:
    folder.mkdir()
    config = make_workspace(folder, kind, model=model, train=ONE_STEP)
    with start(config, overrides) as run:
        yield run


def one_step(run: Started) -> tuple[float, float, int, dict[str, torch.Tensor]]:
    (record,) = run.steps()
    gradients = run.by_name(lambda tile: tile.gradient)
    return record.loss, record.grad_norm, record.tokens, gradients


@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral", "gpt2"])
def test_packed_training_equals_unpacked_training(kind: str, tmp_path: Path) -> None:
    """Losses and gradients; LAB-08, and for Mistral with a window of 8 tokens."""
    with begun(tmp_path / "apart", kind, []) as run:
        loss, norm, tokens, expected = one_step(run)
        count = len(run.rows.examples)
    with begun(tmp_path / "packed", kind, [*PACKED, "data.max_length=64"]) as run:
        assert run.rows.packs is not None
        assert len(run.rows.packs) < count == len(run.rows.packs.documents)
        found = one_step(run)
    assert found[2] == tokens
    assert abs(found[0] - loss) <= 1e-6 * loss
    assert abs(found[1] - norm) <= 1e-6 * norm
    for name, gradient in expected.items():
        assert (found[3][name] - gradient).abs().max() <= 1e-6 * expected[name].abs().max(), name
