"""`megatrain resume`: go on where a run stopped."""

from pathlib import Path
from typing import Annotated

import typer

from megatrain_cli.cli.options import Overrides, parse_overrides, set_environment


def resume(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_OR_CKPT",
            help="A run folder, or one of its checkpoints.",
            readable=False,
        ),
    ],
    overrides: Overrides = None,
    allow_change: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY,...",
            help="Config keys whose new values may change what is learnt; the change is recorded.",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(metavar="M", min=1, help="End at step M instead.", show_default=False),
    ] = None,
    rewind: Annotated[
        bool,
        typer.Option(
            "--rewind", help="Give up what came after this checkpoint; moved, not deleted."
        ),
    ] = False,
    fork: Annotated[
        Path | None,
        typer.Option(
            metavar="NEW_RUN",
            help="Begin a new run in this folder from the checkpoint.",
            show_default=False,
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Go on with weights that are not finite.")
    ] = False,
) -> None:
    """Continue a run from its newest checkpoint, or a named one.

    Reads the config of the checkpoint. A run that has ended says so, and nothing is written.
    """
    from megatrain_cli.checkpoint.fsio import FileSystem
    from megatrain_cli.report.console import RunConsole
    from megatrain_cli.train.outlook import find_device, find_finished
    from megatrain_cli.train.resume import ResumeRequest

    request = ResumeRequest(
        path=run,
        overrides=parse_overrides(overrides),
        allow_change=tuple(allow_change or ()),
        steps=steps,
        rewind=rewind,
        fork=fork,
        force=force,
        here=Path.cwd(),
    )
    refused: dict[Path, str] = {}
    with RunConsole() as console:
        said = find_finished(request, FileSystem(), console.note, refused)
        if said is not None:
            typer.echo(f"{run}: {said}")
            return
        set_environment(find_device(request, FileSystem(), refused))
        from megatrain_cli.train.session import resume as go_on

        go_on(request, console, refused)
