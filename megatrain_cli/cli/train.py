"""`megatrain train`: run what a config file asks for."""

from typing import Annotated

import typer

from megatrain_cli.cli.options import ConfigFile, Overrides, read_config, set_environment


def train(
    config: ConfigFile,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Read config and data and plan; no weights are read, no run is begun."
        ),
    ] = False,
) -> None:
    """Train as a config asks for, from the first step to the last.

    Writes metrics and checkpoints into the run folder, which must hold no run yet. Ctrl-C finishes
    the step and saves; `megatrain resume` goes on. docs/config.md has every key.
    """
    loaded = read_config(config, overrides)
    set_environment(loaded.config.pipeline.device)
    from megatrain_cli.report.console import RunConsole
    from megatrain_cli.train.dry_run import dry_run as rehearse
    from megatrain_cli.train.session import train as run

    with RunConsole() as console:
        (rehearse if dry_run else run)(loaded, console)
