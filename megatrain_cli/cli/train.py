"""`megatrain train`: run what a config file asks for."""

from typing import Annotated

import typer

from megatrain_cli.cli.options import ConfigFile, Overrides, read_config, set_environment


def train(
    config: ConfigFile,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Read config and data and plan; load and write nothing."),
    ] = False,
) -> None:
    """Train.

    Writes metrics and weights into the run folder.
    """
    loaded = read_config(config, overrides)
    set_environment(loaded.config.pipeline.device)
    from megatrain_cli.report.console import RunConsole
    from megatrain_cli.train.dry_run import dry_run as rehearse
    from megatrain_cli.train.session import train as run

    with RunConsole() as console:
        (rehearse if dry_run else run)(loaded, console)
