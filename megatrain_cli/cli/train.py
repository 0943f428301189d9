"""`megatrain train`: run what a config file asks for."""

from megatrain_cli.cli.options import ConfigFile, Overrides, read_config, set_environment


def train(config: ConfigFile, overrides: Overrides = None) -> None:
    """Train.

    Writes metrics and weights into the run folder.
    """
    loaded = read_config(config, overrides)
    set_environment(loaded.config.pipeline.device)
    from megatrain_cli.report.console import RunConsole
    from megatrain_cli.train.session import train as run

    with RunConsole() as console:
        run(loaded, console)
