"""`megatrain probe`: measure this machine, so that plans can speak of seconds."""

import os
from pathlib import Path
from typing import Annotated

import typer

from megatrain_cli.cli.options import AsJson
from megatrain_cli.errors import ConfigError

# Of a file that `probe` wrote, more than enough to know it by.
_HEAD_BYTES = 4096


def _what_is_there(path: Path) -> str | None:
    """Why what is at `path` must not be replaced; None where nothing speaks against it.

    Asked before a minute is spent on measuring. A file that was damaged may still be ours.
    """
    from megatrain_cli.config.paths import is_folder

    if is_folder(path):
        return "is a folder, wanted a file"
    try:
        if not path.exists():
            return None
        if not path.is_file():  # a renamed file would take the place of `/dev/null`
            return "is no ordinary file"
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return None  # saving says why it cannot be written
    ours = not head.strip() or b'"fingerprint"' in head
    return None if ours else "holds something else than a machine and is left as it is"


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
    taken = _what_is_there(path)
    if taken is not None and out is None:
        raise ConfigError(f"{path} {taken}. Remove it, or name another place with `--out`.")
    if taken is not None:
        raise typer.BadParameter(f"--out: `{path}` {taken}")
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
