"""`megatrain inspect-ckpt`: what a run or checkpoint folder holds, read from file headers."""

import json
from pathlib import Path
from typing import Annotated

import typer

from megatrain_cli.cli.options import AsJson
from megatrain_cli.errors import NoCheckpointError


def inspect_ckpt(
    run: Annotated[
        Path, typer.Argument(metavar="RUN_OR_CKPT", help="A run folder or a model folder.")
    ],
    as_json: AsJson = False,
) -> None:
    """List and check the weights of a run.

    Reads the headers of the newest model folder and compares them with its index. Exit code 3 if
    a file is damaged or missing, 5 if there is none.
    """
    from megatrain_cli.checkpoint.headers import find_model_folder, read_folder

    if not run.exists():
        raise NoCheckpointError(f"{run}: there is no such folder (resolved to {run.absolute()})")
    folder = find_model_folder(run)
    if folder is None:
        raise NoCheckpointError(
            f"{run}: no weights here: wanted `config.json` and `model*.safetensors`, in the folder"
            " itself or below its `checkpoints`"
        )
    files = read_folder(folder)
    totals = {
        "tensors": sum(len(file.tensors) for file in files),
        "parameters": sum(file.num_parameters for file in files),
        "bytes": sum(file.num_bytes for file in files),
    }
    if as_json:
        rows = [
            {
                "file": file.name,
                "tensors": len(file.tensors),
                "parameters": file.num_parameters,
                "dtypes": list(file.dtypes),
                "bytes": file.num_bytes,
            }
            for file in files
        ]
        typer.echo(json.dumps({"folder": str(folder), "files": rows, "total": totals}, indent=2))
        return
    from rich.table import Table

    from megatrain_cli.report.console import data
    from megatrain_cli.report.plan_view import print_table, say
    from megatrain_cli.units import show_bytes, show_count

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("file")
    for column in ("tensors", "parameters", "dtypes", "bytes"):
        table.add_column(column, justify="right")
    for file in files:
        parameters, size = show_count(file.num_parameters), show_bytes(file.num_bytes)
        table.add_row(file.name, str(len(file.tensors)), parameters, ", ".join(file.dtypes), size)
    table.add_row(
        "total",
        str(totals["tensors"]),
        show_count(totals["parameters"]),
        "",
        show_bytes(totals["bytes"]),
    )
    say(str(folder), data())
    print_table(table, data())
