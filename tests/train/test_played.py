"""A forecast plays a few of a step's micro-batches, and takes no longer for a step of more."""

from dataclasses import replace

import pytest

from megatrain_cli.plan.decide import Known
from megatrain_cli.plan.machine import MachineSpec
from megatrain_cli.plan.plan import make_plan
from megatrain_cli.train import forecast as forecasts
from megatrain_cli.train.forecast import Forecast, forecast
from tests.plan.small import CPU, GPU, RATES, Sections, layouts_of, make_config, make_spec
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
        found = forecast(plan, spec, None, None)
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
