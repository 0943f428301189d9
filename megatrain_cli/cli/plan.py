"""`megatrain plan`: whether a run fits, and what it would cost, without running it."""

import json
from typing import Annotated

import typer

from megatrain_cli.cli.options import AsJson, ConfigFile, Overrides, read_config


def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    schedule: Annotated[
        bool, typer.Option("--schedule", help="Also print each operation of a step.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show whether a run fits, and at what cost.

    Lists who would own which bytes, and where. Exit code 1 if the run does not fit.
    """
    loaded = read_config(config, overrides)
    from megatrain_cli.report.console import data, talk
    from megatrain_cli.report.plan_view import say, show_plan
    from megatrain_cli.pipeline.ops import schedule_text
    from megatrain_cli.train.assemble import plan_run, schedule_of

    run_plan = plan_run(loaded)
    if as_json:
        values = {**run_plan.to_json(), "config": loaded.config.model_dump(mode="json")}
        if schedule:
            values["schedule"] = schedule_text(schedule_of(run_plan)).splitlines()
        typer.echo(json.dumps(values, indent=2))
        for shortfall in run_plan.shortfalls:
            say(f"does not fit: {shortfall}", talk())
    else:
        show_plan(run_plan, data())
        if schedule:
            typer.echo()
            typer.echo(schedule_text(schedule_of(run_plan)))
    if run_plan.shortfalls:
        raise typer.Exit(1)
