"""A plan as a picture: its bill, and a step played with the machine's rates."""

from megatrain_cli.model.spec import ModelSpec
from megatrain_cli.pipeline.ops import Op
from megatrain_cli.plan.memory import DEVICE
from megatrain_cli.plan.plan import RunPlan
from megatrain_cli.report.picture import Memory, Step, draw_picture
from megatrain_cli.report.timeline import Bar
from megatrain_cli.train.forecast import Forecast, timeline_of


def draw_plan(name: str, spec: ModelSpec, plan: RunPlan, expected: Forecast | None) -> str:
    """The text of an SVG file.

    Args:
        name: Of the model, or of the config.
        spec: The model.
        plan: For it.
        expected: How long it takes; None where no rates are known.
    """
    facts = dict(plan.summary)
    where = plan.machine.device_name or "CPU"
    lines = [f"{facts['model']}; {facts['masters']}", f"{facts['step']}; {facts['activations']}"]
    lines += expected.lines()[:1] if expected is not None else []
    origin = [f"Machine: {plan.machine.origin}"] if plan.machine.origin else []
    return draw_picture(
        f"{name} on {where}", plan.verdict_line, lines, _memory(plan), _step(plan, spec), origin
    )


def _memory(plan: RunPlan) -> list[Memory]:
    """The places, the host first."""
    return [
        Memory(
            place,
            limit,
            [line for line in plan.lines if (line.place == DEVICE) == (place == "GPU memory")],
        )
        for place, (_, limit) in plan.places.items()
    ]


def _step(plan: RunPlan, spec: ModelSpec) -> Step | None:
    timeline = timeline_of(plan, spec)
    if timeline is None:
        return None
    bars = [Bar(t.op.lane, t.op.kind, t.start, t.end, _what(t.op)) for t in timeline.ops]
    return Step(bars, timeline.step_seconds, timeline.seconds_until_loss())


def _what(op: Op) -> str:
    return f"layer {op.layer}" if op.layer >= 0 else ""
