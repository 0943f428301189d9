"""`megatrain train`: run what a config file asks for."""

import os

from megatrain_cli.cli.options import ConfigFile, Overrides, read_config


def train(config: ConfigFile, overrides: Overrides = None) -> None:
    """Train.

    Writes metrics and weights into the run folder.
    """
    loaded = read_config(config, overrides)
    if loaded.config.pipeline.device != "cpu":
        # Read when torch loads OpenMP. Its threads would spin between torch's parallel regions, on
        # cores that belong to the optimizer here. Where torch computes on the CPU itself, spinning
        # makes steps shorter: 4.6 against 5.8 s in the demo on two free cores.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from megatrain_cli.report.console import RunConsole
    from megatrain_cli.train.loop import train as run

    with RunConsole() as console:
        run(loaded, console)
