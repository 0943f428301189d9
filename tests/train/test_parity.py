"""A run of the engine is the run of plain Hugging Face and `torch.optim.AdamW`, in FP32.

Losses, norms, every gradient, every weight and both moments after each step: a loss curve alone
hides most of what can go wrong.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.families import KINDS
from tests.reference import ReferenceTrainer, Row
from tests.train.workspace import Started, make_workspace, start

STEPS, MICRO_BATCH_SIZE, ACCUMULATION = 5, 2, 2
PER_STEP = MICRO_BATCH_SIZE * ACCUMULATION
ROWS = 14  # not a multiple of a step's four: the second epoch begins inside a step
RATES = [0.0, 5e-4, 1e-3, 1e-3, 1e-3]  # two steps of warm-up, then constant
# FP32 sums in another order (our head sees supervised positions alone) move the last bits.
TOLERANCE = 1e-6

FAMILIES = [
    *((kind, tied) for kind in ("llama", "qwen2", "qwen3", "mistral") for tied in (False, True)),
    *(("gpt2", tied) for tied in (False, True)),
]


class Adam(TypedDict):
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_grad_norm: float


# Adam divides by sqrt(v) + eps. Where a gradient is as small as eps, its rounding decides the whole
# step: with 1e-8 that is the noise of ordinary gradients, with 1e-6 it is not.
ADAM: Adam = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1, "max_grad_norm": 0.5}


def assert_close(
    what: str, found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]
) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        worst = ((found[name] - tensor).abs().max() / tensor.abs().max().clamp(min=1e-30)).item()
        assert worst <= TOLERANCE, f"{what} of {name} differs by {worst:.2e}"


def reference_of(run: Started) -> ReferenceTrainer:
    folder = run.loaded.config.model.path
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return ReferenceTrainer(model.eval(), **ADAM)


def rows_of_step(run: Started, index: int) -> list[Row]:
    rows = [run.rows.examples.row((index * PER_STEP + k) % ROWS) for k in range(PER_STEP)]
    return [(torch.from_numpy(ids), torch.from_numpy(labels)) for ids, labels in rows]


def weights_of(run: Started) -> dict[str, torch.Tensor]:
    return run.by_name(lambda tile: tile.weights)


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
        optimizer={**ADAM, "betas": list(ADAM["betas"]), "learning_rate": RATES[-1]},
        schedule={"warmup_steps": 2},
    )
    with start(config) as run:
        assert len(run.rows.examples) == ROWS
        # One reference runs free. The other starts each step from the run's own weights: else a
        # difference in a weight's last bit grows tenfold on its way into the next gradient, and
        # no tolerance could tell it from a small fault.
        free, beside = reference_of(run), reference_of(run)
        steps = run.steps()
        for index in range(STEPS):
            rows, rate, at = rows_of_step(run, index), RATES[index], f"step {index + 1}:"
            beside.set_weights(weights_of(run))
            record, whole, single = next(steps), free.step(rows, rate), beside.step(rows, rate)
            assert single.norm > ADAM["max_grad_norm"], "clipping must bite"
            assert record.learning_rate == rate
            for wanted in (whole, single):
                assert record.loss == pytest.approx(wanted.loss, rel=TOLERANCE)
                assert record.grad_norm == pytest.approx(wanted.norm, rel=TOLERANCE)
            gradients = run.by_name(lambda tile: tile.gradient)
            assert_close(f"{at} gradient", gradients, single.gradients)
            exp_avg = run.by_name(lambda tile: tile.exp_avg)
            assert_close(f"{at} exp_avg", exp_avg, beside.moments("exp_avg"))
            exp_avg_sq = run.by_name(lambda tile: tile.exp_avg_sq)
            assert_close(f"{at} exp_avg_sq", exp_avg_sq, beside.moments("exp_avg_sq"))
            assert_close(f"{at} weight", weights_of(run), beside.weights())
            assert_close(f"{at} weight, run free,", weights_of(run), free.weights())


def test_every_family_is_compared() -> None:
    assert {kind for kind, _ in FAMILIES} == set(KINDS)
