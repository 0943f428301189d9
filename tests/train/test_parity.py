"""A run of the engine is the run of plain Hugging Face and `torch.optim.AdamW`, in FP32.

Losses, norms, every gradient of every step, every weight and both moments: a loss curve alone
hides most of what can go wrong.
"""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.families import KINDS
from tests.reference import Reference, Row, train_reference
from tests.train.workspace import Started, make_workspace, start

STEPS, MICRO_BATCH_SIZE, ACCUMULATION = 5, 2, 2
ROWS = 14  # not a multiple of a step's four: the second epoch begins inside a step
RATES = [0.0, 1.5e-3, 3e-3, 3e-3, 3e-3]
# Adam divides by sqrt(v) + eps. Where a gradient is as small as eps, its rounding decides the whole
# step; with 1e-8 that is float noise of ordinary gradients, with 1e-6 it is not.
ADAM = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1, "max_grad_norm": 0.5}
# FP32 sums in another order (the head sees supervised positions alone) move the last bits.
TOLERANCE = 1e-6

FAMILIES = [
    *((kind, tied) for kind in ("llama", "qwen2", "qwen3", "mistral") for tied in (False, True)),
    ("gpt2", True),
]


def assert_close(name: str, found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]):
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        scale = tensor.abs().max().clamp(min=1e-30)
        worst = ((found[key] - tensor).abs().max() / scale).item()
        assert worst <= TOLERANCE, f"{name} of {key} differs by {worst:.2e}"


def reference_of(run: Started) -> Reference:
    model = AutoModelForCausalLM.from_pretrained(
        run.loaded.config.model.path, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    examples, per_step = run.rows.examples, MICRO_BATCH_SIZE * ACCUMULATION
    assert len(examples) == ROWS

    def row(g: int) -> Row:
        input_ids, labels = examples.row(g % ROWS)
        return torch.from_numpy(input_ids), torch.from_numpy(labels)

    steps = [[row(s * per_step + k) for k in range(per_step)] for s in range(STEPS)]
    return train_reference(model, steps, RATES, **ADAM)


@pytest.mark.parametrize(("kind", "tied"), FAMILIES)
def test_five_steps_equal_plain_autograd_and_torch_adamw(
    kind: str, tied: bool, tmp_path: Path
) -> None:
    config = make_workspace(
        tmp_path,
        kind,
        tied=tied,
        rows=ROWS,
        train={
            "max_steps": STEPS,
            "micro_batch_size": MICRO_BATCH_SIZE,
            "gradient_accumulation_steps": ACCUMULATION,
        },
        optimizer={"learning_rate": RATES[-1], **ADAM, "betas": list(ADAM["betas"])},
        schedule={"warmup_steps": 2},
    )
    with start(config) as run:
        wanted = reference_of(run)
        assert min(wanted.norms) > ADAM["max_grad_norm"], "clipping must bite"
        for index, record in enumerate(run.steps()):
            assert record.learning_rate == RATES[index]
            assert record.loss == pytest.approx(wanted.losses[index], rel=TOLERANCE)
            assert record.grad_norm == pytest.approx(wanted.norms[index], rel=TOLERANCE)
            gradients = run.by_name(lambda tile: tile.gradient)
            assert_close(f"step {index + 1}: gradient", gradients, wanted.gradients[index])
        assert_close("weight", run.by_name(lambda tile: tile.weights), wanted.weights)
        assert_close("exp_avg", run.by_name(lambda tile: tile.exp_avg), wanted.exp_avg)
        assert_close("exp_avg_sq", run.by_name(lambda tile: tile.exp_avg_sq), wanted.exp_avg_sq)


def test_every_family_is_compared() -> None:
    assert {kind for kind, _ in FAMILIES} == set(KINDS)
