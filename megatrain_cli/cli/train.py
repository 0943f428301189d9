"""`megatrain train`: run what a config file asks for."""

from megatrain_cli.cli.options import ConfigFile, Overrides, read_config


def train(config: ConfigFile, overrides: Overrides = None) -> None:
    """Train.

    Writes metrics and weights into the run folder.
    """
    loaded = read_config(config, overrides)
    from megatrain_cli.report.console import RunConsole
    from megatrain_cli.train.loop import train as run

    with RunConsole() as console:
        run(loaded, console)
