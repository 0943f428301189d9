"""What the CPU takes beside products: each part where a run does it, at its measured rate."""

from dataclasses import replace

import pytest

from megatrain_cli.model.spec import ModelSpec
from megatrain_cli.pipeline.ops import Kind
from megatrain_cli.plan.heap import BLOCK_BYTES
from megatrain_cli.plan.plan import RunPlan
from megatrain_cli.train.assemble import schedule_of
from megatrain_cli.train.cpu_costs import CpuCosts
from megatrain_cli.train.forecast import forecast
from tests.plan.small import CPU, RATES, Sections, make_spec, plan_for
from tests.train.test_look_ahead import ALL_CORES, CORES

_MACHINE = replace(CPU, rates=replace(RATES, compute=None, link=None, cpu=ALL_CORES))
_ONE: Sections = {"train": {"micro_batch_size": 1}}
_TWO: Sections = {"train": {"micro_batch_size": 2}}


def seconds(spec: ModelSpec, plan: RunPlan, kind: Kind, layer: int) -> list[float]:
    """Of each micro-batch."""
    costs = CpuCosts(plan, spec, ALL_CORES)
    return [costs(op) for op in schedule_of(plan) if op.kind is kind and op.layer == layer]


def test_a_gradient_that_needs_new_memory_pays_for_it_with_each_row() -> None:
    # Two matrices of width x 4 width in BF16.
    width = next(n for n in range(64, 4096, 64) if 8 * n * n >= BLOCK_BYTES)
    below, above = make_spec(hidden=width - 64), make_spec(hidden=width)
    row = {spec: CORES.cost(spec.hidden_size).row * 2 / 3 for spec in (below, above)}
    for spec, fresh in ((below, 0.0), (above, 2 * 8 * width * width / ALL_CORES.fresh)):
        (found,) = seconds(spec, plan_for(spec, _MACHINE, _ONE), Kind.BACKWARD, 2)
        numel = spec.layers[2].numel
        expected = numel * (row[spec] + 1 / CORES.sums.finish) + fresh
        assert found == pytest.approx(expected)


def test_one_row_is_not_summed_and_more_are() -> None:
    spec = make_spec(hidden=64)
    numel, sums = spec.layers[2].numel, CORES.sums
    (one,) = seconds(spec, plan_for(spec, _MACHINE, _ONE), Kind.BACKWARD, 2)
    first, last = seconds(spec, plan_for(spec, _MACHINE, _TWO), Kind.BACKWARD, 2)
    assert last - one == pytest.approx(numel / sums.more)
    assert first - one == pytest.approx(numel / sums.first - numel / sums.finish)


@pytest.mark.parametrize("tied", [False, True])
def test_the_weights_of_a_head_are_summed_for_each_row_whoever_owns_them(tied: bool) -> None:
    spec = make_spec(hidden=64, tied=tied)
    plan = plan_for(spec, _MACHINE, _ONE)
    matrix, norm = spec.embed.numel, 64
    (loss,) = seconds(spec, plan, Kind.LOSS, len(spec.layers) - 1)
    row = CORES.cost(64).row * (matrix + (0 if tied else norm))
    logits = plan.decisions.max_length * spec.vocab_size / CORES.logits
    finish = (norm if tied else matrix + norm) / CORES.sums.finish
    assert loss == pytest.approx(row + logits + (matrix + norm) / CORES.sums.more + finish)
    (embed,) = seconds(spec, plan, Kind.BACKWARD, 0)
    both = matrix / CORES.sums.more if tied else 0.0  # the head's part and its own
    assert embed == pytest.approx(matrix / CORES.sums.finish + both)


def test_logits_that_need_new_memory_pay_for_six_blocks_in_bf16() -> None:
    few, many = (make_spec(hidden=16, vocab=n) for n in (1000, 40000))
    (loss,) = seconds(few, plan_for(few, _MACHINE, _ONE), Kind.LOSS, 4)
    (slow,) = seconds(many, plan_for(many, _MACHINE, _ONE), Kind.LOSS, 4)
    logits = 64 * 40000
    assert slow - 40 * loss == pytest.approx(20 * logits / ALL_CORES.fresh, rel=0.01)


def test_on_the_cpu_training_waits_for_all_of_a_save() -> None:
    spec = make_spec(hidden=64)
    found = forecast(plan_for(spec, _MACHINE, _ONE), spec, 10)
    assert found is not None
    assert found.save_seconds
    assert found.stall_seconds == found.save_seconds
