"""What a forecast plays: a few of a step's micro-batches, and copies by their pools."""

from dataclasses import replace

import pytest

from megatrain_cli.pipeline.ops import Kind
from megatrain_cli.plan.decide import Known
from megatrain_cli.plan.machine import MachineSpec
from megatrain_cli.plan.plan import make_plan
from megatrain_cli.plan.rates import ThreadRate
from megatrain_cli.plan.tiles import DTYPE_BYTES
from megatrain_cli.train import forecast as forecasts
from megatrain_cli.train.forecast import Forecast, forecast, timeline_of
from tests.plan.small import (
    CPU,
    GPU,
    RATES,
    Sections,
    layouts_of,
    make_config,
    make_spec,
    plan_for,
)
from tests.train.test_look_ahead import ALL_CORES

ON_GPU = replace(GPU, rates=RATES)
ON_CPU = replace(CPU, rates=replace(RATES, compute=None, link=None, cpu=ALL_CORES))


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("on", [ON_GPU, ON_CPU], ids=["gpu", "cpu"])
def test_a_few_micro_batches_are_played_for_any_number(
    on: MachineSpec, offload: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_spec(hidden=64)

    def seconds(count: int) -> Forecast:
        asked: Sections = {
            "train": {"micro_batch_size": 1, "gradient_accumulation_steps": count},
            "pipeline": {"activations": {"keep_layers": 1, "offload": offload}},
        }
        known = Known(joined=1)
        plan = make_plan(make_config(asked), spec, layouts_of(spec), on, known)
        found = forecast(plan, spec, None)
        assert found is not None
        return found

    few, many = seconds(8), seconds(45)
    endless = seconds(2**60)  # were each played, this would not end
    with monkeypatch.context() as patch:
        patch.setattr(forecasts, "_PLAYED", 45)
        for short, whole in ((few, seconds(8)), (many, seconds(45))):
            assert short.step_seconds == pytest.approx(whole.step_seconds, rel=1e-3)
            assert short.forward_seconds == pytest.approx(whole.forward_seconds, rel=1e-3)
            assert short.backward_seconds == pytest.approx(whole.backward_seconds, rel=1e-3)
    assert few.step_seconds < many.step_seconds < endless.step_seconds


@pytest.mark.parametrize(("cores", "cpu", "gpu"), [(1, 1e9, 1e9), (3, 2e9, 2e9), (16, 4e9, 2e9)])
def test_gradients_are_taken_in_by_one_pool_on_the_cpu_and_beside_another_on_a_gpu(
    cores: int, cpu: float, gpu: float
) -> None:
    """Four threads a pool where there are cores for them, and RAM ends at 4 GB/s."""
    copy = tuple(ThreadRate(n, min(n, 4) * 1e9) for n in (1, 2, 4, 8))
    spec = make_spec(hidden=64)
    for machine, rate in ((ON_CPU, cpu), (ON_GPU, gpu)):
        assert machine.rates is not None
        here = replace(machine, num_cores=cores, rates=replace(machine.rates, copy=copy))
        plan = plan_for(spec, here, {"store": {"memory": "pageable"}})
        timeline = timeline_of(plan, spec)
        assert timeline is not None
        taken = [t for t in timeline.ops if t.op.kind is Kind.ACCUMULATE and t.op.layer == 1]
        num_bytes = spec.layers[1].numel * DTYPE_BYTES[plan.decisions.dtype]
        assert sum(t.end - t.start for t in taken) == pytest.approx(num_bytes / rate)
