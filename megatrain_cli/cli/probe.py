"""`megatrain probe`: measure this machine, so that plans can speak of seconds."""

import os
from pathlib import Path
from typing import Annotated

import typer

from megatrain_cli.cli.options import AsJson
from megatrain_cli.errors import ConfigError


def probe(
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Where to write the result; without it where `plan` and `train` look.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[
        str, typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda or cuda:N.")
    ] = "auto",
    disk: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder whose disk is measured.")
    ] = Path(),
    as_json: AsJson = False,
) -> None:
    """Measure this machine, in less than a minute.

    Link, memory, optimizer, disk and GPU. The file names no host. The machine should be idle.
    """
    from megatrain_cli.config.paths import is_folder
    from megatrain_cli.plan.machine_file import default_path, save_machine_file

    if device not in ("auto", "cpu", "cuda") and not (
        device.startswith("cuda:") and device[5:].isdecimal()
    ):
        raise typer.BadParameter(f"--device: wanted auto, cpu, cuda or cuda:N, got `{device}`")
    if not is_folder(disk):
        raise typer.BadParameter(f"--disk: there is no folder `{disk}`")
    path = out or default_path()
    if path is None:
        raise ConfigError("There is no home folder to write to: name a file with `--out`.")
    if is_folder(path):
        raise typer.BadParameter(f"--out: `{path}` is a folder, wanted a file")
    if device != "cpu":
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in `train`
    from megatrain_cli.measure import machine
    from megatrain_cli.measure.amounts import FULL
    from megatrain_cli.report.console import data, talk
    from megatrain_cli.report.machine_view import show_machine
    from megatrain_cli.report.plan_view import say

    console = talk()
    measured = machine.measure_machine(device, disk, FULL, lambda text: say(text, console))
    try:
        save_machine_file(measured, path)
    finally:  # what a minute has measured is shown, saved or not
        if as_json:
            typer.echo(measured.to_json(), nl=False)
        else:
            show_machine(measured, data())
    say(f"saved {path}", console)
