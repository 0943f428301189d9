"""`megatrain plan`: whether a run fits, and what it would cost, without running it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatrain_cli.cli.options import AsJson, ConfigFile, Overrides, read_config

if TYPE_CHECKING:
    from megatrain_cli.config.load import LoadedConfig


def values_as_read(loaded: "LoadedConfig") -> list[tuple[str, str]]:
    """Each key that the user set, with the value that was understood, such as `1e-05`."""
    sections = loaded.config.model_dump(mode="json", exclude_none=True)
    pairs = [(key, key.split(".")) for key in sorted(loaded.explicit)]
    return [(key, json.dumps(sections[path[0]].get(path[1]))) for key, path in pairs]


def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    schedule: Annotated[
        bool, typer.Option("--schedule", help="Also print each operation of a step.")
    ] = False,
    machine: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Plan for the machine of this file from `megatrain probe`, not for this one.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show whether a run fits, and at what cost.

    Lists who would own which bytes, and where. Exit code 1 if the run does not fit.
    """
    loaded = read_config(config, overrides)
    from megatrain_cli.plan.machine_file import load_machine_file

    file = None if machine is None else load_machine_file(machine)
    there = file.machine.on(loaded.config.pipeline.device) if file else None
    from megatrain_cli.pipeline.ops import schedule_text
    from megatrain_cli.report.console import data, talk
    from megatrain_cli.report.plan_view import say, show_plan
    from megatrain_cli.train.assemble import prepare, schedule_of
    from megatrain_cli.train.forecast import forecast
    from megatrain_cli.train.pricing import lines_of, price, starving_slabs

    skeleton, run_plan = prepare(loaded, there)
    train, saves = loaded.config.train, loaded.config.checkpoint
    expected = forecast(run_plan, skeleton.spec, train.max_steps, saves.save_steps)
    remedies = price(loaded.config, skeleton, run_plan)
    starving = starving_slabs(skeleton, run_plan)
    if starving:
        run_plan = replace(run_plan, warnings=(*run_plan.warnings, starving))
    if as_json:
        values = {**run_plan.to_json(), "config": loaded.config.model_dump(mode="json")}
        values["step_seconds"] = None  # where no rates are known
        values |= expected.to_json() if expected else {}
        values["remedies"] = [remedy.to_json() for remedy in remedies]
        if schedule:
            values["schedule"] = schedule_text(schedule_of(run_plan)).splitlines()
        typer.echo(json.dumps(values, indent=2))
        for shortfall in run_plan.shortfalls:
            say(f"does not fit: {shortfall}", talk())
    else:
        console = data()
        for key, value in values_as_read(loaded):
            say(f"{key} = {value}", console)
        say("", console)
        show_plan(run_plan, console)
        for line in (*(expected.lines() if expected else ()), *lines_of(remedies)):
            say(line, console)
        if schedule:
            typer.echo()
            typer.echo(schedule_text(schedule_of(run_plan)))
    if run_plan.shortfalls:
        raise typer.Exit(1)
