"""`megatrain plan`: whether a run fits, and what it would cost, without running it."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatrain_cli.cli.options import AsJson, Overrides, parse_overrides, read_config, say_notes
from megatrain_cli.errors import StorageError
from megatrain_cli.units import show_count

if TYPE_CHECKING:
    from megatrain_cli.config.load import LoadedConfig
    from megatrain_cli.model.skeleton import Skeleton
    from megatrain_cli.plan.machine import MachineSpec

# Of micro-batches through layers, each with a forward and a backward: some 30 MB of text.
_LISTED_PASSES = 100_000

# Keys of what `plan --model` neither reads nor writes, beside most of `data`.
_OF_FILES = frozenset({"model.init", "train.output_dir", "train.num_epochs"})


def values_as_read(loaded: "LoadedConfig") -> list[tuple[str, str]]:
    """Each key that the user set, with the value that was understood, such as `1e-05`."""
    sections = loaded.config.model_dump(mode="json", exclude_none=True)
    pairs = [(key, key.split(".")) for key in sorted(loaded.explicit)]
    return [(key, json.dumps(sections[path[0]].get(path[1]))) for key, path in pairs]


def read_request(
    config: Path | None, words: list[str] | None, model: str | None, tokens: str | None
) -> "LoadedConfig":
    """The config of a file, or a config around a model's name, with `--tokens` laid over it."""
    words = [*(words or ()), *_tokens_as_overrides(tokens)]
    if model is None:
        if config is None:
            raise typer.BadParameter("wanted a config file, or --model NAME")
        return read_config(config, words)
    if config is not None:  # what comes first is taken for the config
        words.insert(0, str(config))
        if "=" not in words[0]:
            raise typer.BadParameter(f"--model stands in place of the config {config}: give one")
    from megatrain_cli.config.load import parse_config
    from megatrain_cli.model.shapes import find_shape

    shape = find_shape(model)
    # Nothing is read or written: data and folder have to be named, and are not looked at.
    overrides = parse_overrides(words)
    counted = any(word.startswith("train.max_steps=") for word in overrides)
    text = (
        f"model: {{path: '{shape.name}', attention: {shape.attention}}}\n"
        "data: {train: rows.jsonl}\n"
        f"train: {{output_dir: run, {'' if counted else 'num_epochs: 1'}}}\n"
    )
    loaded = parse_config(text, Path(f"--model {model}"), overrides, Path.cwd())
    given = frozenset(word.partition("=")[0] for word in loaded.overrides)
    if "model.path" in given:
        raise typer.BadParameter(
            "--model names the model: leave `model.path` out, or name a config instead"
        )
    say_notes(loaded)
    unread = [key for key in sorted(given) if key in _OF_FILES or _is_of_rows(key)]
    if unread:
        typer.echo(
            f"note: {', '.join(unread)}: no effect on a plan with --model, which reads no files",
            err=True,
        )
    return replace(loaded, explicit=given)


def _is_of_rows(key: str) -> bool:
    return key.startswith("data.") and key not in ("data.max_length", "data.packing")


def find_machine(name: str) -> "MachineSpec":
    """The machine of a file from `megatrain probe`, or of a profile."""
    from megatrain_cli.config.paths import exists
    from megatrain_cli.plan.machine_file import load_machine_file
    from megatrain_cli.plan.profiles import find_profile

    if not exists(Path(name)) and Path(name).name == name and not name.endswith(".json"):
        return find_profile(name)  # or it names those that there are
    file = load_machine_file(Path(name))
    assert file is not None  # a file that was named is read or refused
    return replace(file.machine, origin=f"{name}, measured {file.date[:10]}")


def billed_as_others(skeleton: "Skeleton") -> list[str]:
    """A line if the model keeps parameters in a dtype of their own."""
    if not skeleton.foreign:
        return []
    numel = {p.name: p.numel for layer in skeleton.spec.layers for p in layer.params}
    own = sum(numel[name] for name in skeleton.foreign)
    name, dtype = next(iter(skeleton.foreign.items()))
    theirs, ours = (str(one).removeprefix("torch.") for one in (dtype, skeleton.dtype))
    line = (
        f"{show_count(own)} of {show_count(skeleton.spec.num_parameters)} parameters, such as "
        f"`{name}`, are kept in {theirs} and billed as {ours}"
    )
    return [line]


def _tokens_as_overrides(tokens: str | None) -> list[str]:
    if tokens is None:
        return []
    found = re.fullmatch(r"([1-9][0-9]*)x([1-9][0-9]*)", tokens)
    if found is None:
        raise typer.BadParameter(f"--tokens wants ROWSxLENGTH such as 64x1024, got `{tokens}`")
    # Single rows: as many pass together as fit, see `ways_to_join`.
    return [
        "train.micro_batch_size=1",
        f"train.gradient_accumulation_steps={found[1]}",
        f"data.max_length={found[2]}",
    ]


def write_picture(path: Path, picture: str) -> None:
    """Write the picture of a plan; a picture that was there is replaced.

    Raises:
        typer.BadParameter: What is there is something else, such as the config.
        StorageError: The file cannot be written.
    """
    try:
        before = path.read_bytes() if path.is_file() else b""
        if before and not before.startswith((b"<svg", b"<?xml")):
            raise typer.BadParameter(f"--svg: `{path}` is no picture; it is left as it is")
        path.write_text(picture, encoding="utf-8")
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror or error}. Name another place with `--svg`."
        ) from error


def plan(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG",
            help="The run's YAML file; not with --model.",
            show_default=False,
        ),
    ] = None,
    overrides: Overrides = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Plan for this published model, such as qwen2.5-32b, in place of a config.",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            metavar="ROWSxLENGTH",
            help="Rows of a step and their length, such as 64x1024; the plan divides the rows.",
            show_default=False,
        ),
    ] = None,
    schedule: Annotated[
        bool, typer.Option("--schedule", help="Also print each operation of a step.")
    ] = False,
    machine: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|NAME",
            help="Plan for the machine of this file from `megatrain probe`, or for a known one "
            "such as h200-1.5tb, not for this one.",
            show_default=False,
        ),
    ] = None,
    svg: Annotated[
        Path | None,
        typer.Option(
            "--svg",
            metavar="FILE",
            help="Also draw memory and a step's timeline into this file.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show whether a run fits, and at what cost.

    Lists who would own which bytes, and where. Exit code 1 if the run does not fit.
    """
    loaded = read_request(config, overrides, model, tokens)
    there = None if machine is None else find_machine(machine).on(loaded.config.pipeline.device)
    from megatrain_cli.model.discover import PROVED
    from megatrain_cli.pipeline.ops import LETTERS, schedule_text
    from megatrain_cli.report.console import data, talk
    from megatrain_cli.report.plan_view import say, show_plan
    from megatrain_cli.report.timeline import Bar, draw_timeline
    from megatrain_cli.train.assemble import prepare, schedule_of
    from megatrain_cli.train.drawing import draw_plan
    from megatrain_cli.train.forecast import forecast, timeline_of
    from megatrain_cli.train.joining import warned
    from megatrain_cli.train.look_ahead import look_ahead
    from megatrain_cli.train.pricing import lines_of, price

    skeleton, run_plan = prepare(loaded, there, model, to_train=False)
    proved = skeleton.spec.architecture in PROVED
    if not proved:
        architecture = skeleton.spec.architecture
        typer.echo(f"note: training of {architecture} is not proved: `train` refuses it", err=True)
    for note in billed_as_others(skeleton):
        typer.echo(f"note: {note}", err=True)
    if model is None:
        run_plan = look_ahead(loaded, skeleton, run_plan)
    passes = len(run_plan.layer_numels) * run_plan.decisions.num_micro_batches
    if schedule and passes > _LISTED_PASSES:
        raise typer.BadParameter(
            f"--schedule lists up to {_LISTED_PASSES} passes through a layer, and a step of this "
            f"run has {passes}: leave it out, or ask for fewer rows"
        )
    asked = loaded.config
    expected = forecast(
        run_plan, skeleton.spec, asked.train.max_steps, asked.checkpoint, asked.eval
    )
    remedies = price(loaded.config, skeleton, run_plan)
    run_plan = warned(loaded.config, skeleton, run_plan)
    if svg is not None:
        name = model or str(config)
        write_picture(svg, draw_plan(name, skeleton.spec, run_plan, expected))
        say(f"picture: {svg}", talk())
    if as_json:
        values = {**run_plan.to_json(), "config": loaded.config.model_dump(mode="json")}
        values |= {"proved": proved, "parameters": skeleton.spec.num_parameters}
        values["active_parameters"] = skeleton.spec.num_active
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
        # What would help stands below, priced.
        for line in run_plan.missing if remedies else run_plan.shortfalls:
            say(f"does not fit: {line}", console, style="bold red")
        for line in (*(expected.lines() if expected else ()), *lines_of(run_plan, remedies)):
            say(line, console)
        if schedule:
            typer.echo()
            typer.echo(schedule_text(schedule_of(run_plan)))
            timeline = timeline_of(run_plan, skeleton.spec)
            if timeline is not None:
                bars = [Bar(t.op.lane, t.op.kind, t.start, t.end) for t in timeline.ops]
                typer.echo(f"\n{draw_timeline(bars, LETTERS)}")
    if run_plan.shortfalls:
        raise typer.Exit(1)
