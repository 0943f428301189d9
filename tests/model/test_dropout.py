"""A recompute with the same random state draws the same dropout masks as the forward."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain_cli.model.template import LayerTemplate, Prologue
from tests.families import KINDS, make_tiny
from tests.model.streamed import Streamed, random_ids, save_and_open


def open_with_dropout(kind: str, folder: Path, attention: str) -> Streamed:
    names = ["attn_pdrop", "resid_pdrop", "embd_pdrop"] if kind == "gpt2" else ["attention_dropout"]
    fields: dict[str, Any] = dict.fromkeys(names, 0.3)
    tiny = make_tiny(kind, tied=True, **fields)
    model = save_and_open(tiny, folder, torch.float32, attention)
    return Streamed.open(model, folder, torch.float32, attention)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_same_seed_gives_the_same_masks(kind: str, attention: str, tmp_path: Path) -> None:
    streamed = open_with_dropout(kind, tmp_path, attention)
    prologue, template = Prologue(streamed.skeleton), LayerTemplate(streamed.skeleton, 0)
    hidden, args = prologue(prologue.leaves(streamed.runs[0]), random_ids(2, 9))

    def run(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return template(template.leaves(streamed.runs[1]), hidden, args[0])

    with torch.random.fork_rng(devices=[]):
        assert torch.equal(run(1), run(1))
        assert not torch.equal(run(1), run(2))


def test_gradients_belong_to_the_masks_of_the_forward(tmp_path: Path) -> None:
    streamed = open_with_dropout("gpt2", tmp_path, "eager")
    ids = random_ids(2, 9)
    name = "transformer.h.1.mlp.c_fc.weight"
    entry = streamed.skeleton.layouts[2].by_name[name]
    direction = torch.randn(entry.param.numel, generator=torch.Generator().manual_seed(0))

    def loss_at(step: float) -> float:
        run = streamed.runs[2]
        saved = run.clone()
        run[entry.offset : entry.end] += step * direction
        loss, _ = streamed.loss_and_gradients(ids, ids, 16, seed=5)
        run.copy_(saved)
        return float(loss)

    with torch.random.fork_rng(devices=[]):
        _, gradients = streamed.loss_and_gradients(ids, ids, 16, seed=5)
        measured = (loss_at(1e-3) - loss_at(-1e-3)) / 2e-3
    # FP32 losses to seven digits, divided by a step of 1e-3.
    assert float(gradients[name].flatten() @ direction) == pytest.approx(measured, rel=0.02)
