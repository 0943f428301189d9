"""All that a run settles before it takes memory: config, rows, plan. Only prepared rows stay."""

from pathlib import Path

from megatrain_cli.config.load import LoadedConfig
from megatrain_cli.report.console import RunConsole
from megatrain_cli.train.assemble import prepare
from megatrain_cli.train.forecast import forecast
from megatrain_cli.train.joining import warned
from megatrain_cli.train.look_ahead import is_hopeless, with_rows
from megatrain_cli.train.model_folder import weights_of
from megatrain_cli.train.preparation import refuse_what_does_not_fit, take_rows
from megatrain_cli.units import show_number


def dry_run(loaded: LoadedConfig, console: RunConsole) -> None:
    """Read the data as a run would, and plan with its rows; no weights, no run folder.

    Of the weights only the files' headers are read, where there are any: a config may be tried
    before its model has been downloaded.

    Args:
        loaded: What was asked.
        console: Hears what a person should know.

    Raises:
        PlanError: It does not fit.
        MegatrainError: Rows, tokenizer or model are not as they should be.
    """
    config = loaded.config
    skeleton, plan = prepare(loaded)
    if is_hopeless(config, skeleton, plan):
        refuse_what_does_not_fit(plan)  # before any data is read
    if config.model.init == "pretrained" and any(Path(config.model.path).glob("*.safetensors*")):
        weights_of(config, skeleton)
    rows = take_rows(config, skeleton, plan, console)
    plan = with_rows(config, skeleton, plan, rows)
    plan = warned(config, skeleton, plan)
    console.plan(plan)
    spec, steps = skeleton.spec, rows.total_steps
    expected = forecast(plan, spec, steps, config.checkpoint, config.eval)
    for line in expected.lines() if expected else ():
        console.note(line)
    refuse_what_does_not_fit(plan)
    console.note(
        f"dry run: {show_number(rows.total_steps, 'step')} of "
        f"{show_number(rows.rows_per_step, 'row')} would be made; no weights "
        "were loaded and no run folder was written"
    )
