"""`megatrain resume`: go on where a run stopped."""

from pathlib import Path
from typing import Annotated

import typer

from megatrain_cli.cli.options import Overrides, parse_overrides
from megatrain_cli.errors import NoCheckpointError


def resume(
    run: Annotated[Path, typer.Argument(metavar="RUN_OR_CKPT", help="A run folder.")],
    overrides: Overrides = None,
) -> None:
    """Continue a run from its newest checkpoint.

    This version writes weights only, so there is nothing to resume from; it says how to train on.
    """
    from megatrain_cli.checkpoint.headers import find_model_folder

    parse_overrides(overrides)
    if not run.exists():
        raise NoCheckpointError(f"{run}: there is no such folder (resolved to {run.absolute()})")
    folder = find_model_folder(run)
    if folder is None:
        raise NoCheckpointError(f"{run}: no checkpoint to resume from: no saved weights in it")
    raise NoCheckpointError(
        f"{run}: no checkpoint to resume from: this version saves weights only, not the optimizer."
        f" To train on from the weights, run `megatrain train` with model.path={folder}"
    )
