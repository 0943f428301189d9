"""`megatrain train`: run what a config file asks for."""

import os
from pathlib import Path

from megatrain_cli.cli.options import ConfigFile, Overrides, read_config


def train(config: ConfigFile, overrides: Overrides = None) -> None:
    """Train.

    Writes metrics and weights into the run folder.
    """
    loaded = read_config(config, overrides)
    if loaded.config.pipeline.device != "cpu":
        # Read when torch loads OpenMP. Its threads would spin between torch's parallel regions, on
        # cores that belong to the optimizer here. Where torch computes on the CPU itself, spinning
        # makes steps shorter (docs/benchmarks.md, Demo).
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        # What torch.compile makes is kept for the next run; torch's own default is a temporary
        # folder, which a restart of the machine empties.
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "megatrain" / "compiled"))
    from megatrain_cli.report.console import RunConsole
    from megatrain_cli.train.session import train as run

    with RunConsole() as console:
        run(loaded, console)
