"""`megatrain inspect-ckpt`: what a checkpoint, a run or a model folder holds, and is it good."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatrain_cli.cli.given import open_given
from megatrain_cli.cli.options import AsJson, count_threads
from megatrain_cli.errors import NoCheckpointError

if TYPE_CHECKING:
    from megatrain_cli.checkpoint.fsio import FileSystem
    from megatrain_cli.checkpoint.inspect import Inspection


def inspect_ckpt(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_OR_CKPT",
            help="A run folder, a checkpoint or a model folder.",
            readable=False,
        ),
    ],
    full: Annotated[bool, typer.Option("--full", help="Also hash every byte.")] = False,
    numerics: Annotated[
        bool, typer.Option("--numerics", help="Also look at every value: NaN, range, masters.")
    ] = False,
    open_model: Annotated[
        bool, typer.Option("--open", help="Also compare with the model of its config; loads torch.")
    ] = False,
    diff: Annotated[
        Path | None,
        typer.Option(
            metavar="OTHER",
            help="Compare with another checkpoint bit by bit; exit code 1 if they differ.",
            show_default=False,
            readable=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check a checkpoint, or list those of a run.

    Of a run, the checkpoint that `resume` would take is checked.

    Without options it reads manifest, headers and index: seconds, whatever the size. Exit code 0 if
    all that was looked at is good, 3 if damaged, 4 if made for another version or model, 5 if there
    is no complete checkpoint, 8 if values are not finite.
    """
    from megatrain_cli.checkpoint.fsio import FileSystem
    from megatrain_cli.checkpoint.resolve import check_there, is_checkpoint, is_run

    check_there(run)
    fs = FileSystem()
    if diff is not None:
        if full or numerics or open_model:
            raise typer.BadParameter("--diff reads everything and takes no other check beside it")
        _compare(run, diff, fs, as_json=as_json)
    elif is_checkpoint(run, fs) or (not is_run(run, fs) and _is_unfinished(run)):
        found = _inspect(run, fs, full=full, numerics=numerics, open_model=open_model)
        _show(found, as_json=as_json)
        _leave(found.exit_code)
    elif is_run(run, fs):
        _survey(run, fs, full=full, numerics=numerics, open_model=open_model, as_json=as_json)
    else:
        _check_model(run)
        if full or numerics or open_model:
            raise typer.BadParameter(
                f"{run} is no checkpoint and no run: --full, --numerics and --open are for those"
            )
        _list_weights(run, as_json=as_json)


def _inspect(
    folder: Path, fs: "FileSystem", *, full: bool, numerics: bool, open_model: bool
) -> "Inspection":
    from megatrain_cli.checkpoint.inspect import Check, inspect_checkpoint

    more: list[tuple[str, Check]] = []
    if open_model:
        from megatrain_cli.checkpoint.opens import check_opens

        more.append(("model and tokenizer", check_opens))
    return inspect_checkpoint(
        folder, fs, full=full, numerics=numerics, more=more, threads=count_threads()
    )


def _show(found: "Inspection", *, as_json: bool) -> None:
    from megatrain_cli.report.checkpoint_view import show_checkpoint, show_numbers
    from megatrain_cli.report.console import data
    from megatrain_cli.report.plan_view import say

    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2))
        return
    show_checkpoint(found, data())
    if found.numbers:
        say("", data())
        show_numbers(found.numbers, data())


def _survey(
    run: Path, fs: "FileSystem", *, full: bool, numerics: bool, open_model: bool, as_json: bool
) -> None:
    from megatrain_cli.checkpoint.survey import survey
    from megatrain_cli.report.checkpoint_view import show_run
    from megatrain_cli.report.console import data
    from megatrain_cli.report.plan_view import say

    found = survey(run, fs)
    picked = found.picked
    closer = None
    if picked is not None:
        folder = picked.inspection.folder
        closer = _inspect(folder, fs, full=full, numerics=numerics, open_model=open_model)
    if as_json:
        values = {
            "folder": str(run),
            "kind": "run",
            "checkpoints": [row.to_json() for row in found.rows],
            "resume": picked.name if picked else None,
            "inspected": closer.to_json() if closer else None,
            "notes": list(found.notes),
        }
        typer.echo(json.dumps(values, indent=2))
    else:
        say(f"run {run}", data())
        show_run(found.rows, data())
        for row in found.rows:
            if row.problem:
                say(f"{row.name}: {row.problem}", data(), style="bold red")
        for note in found.notes:
            say(f"note: {note}", data())
        if closer is not None:
            say("", data())
            _show(closer, as_json=False)
    if picked is None:
        raise NoCheckpointError(f"{run}: no checkpoint to resume from{found.advice}")
    _leave((closer.exit_code if closer else 0) or found.exit_code)


def _compare(one: Path, other: Path, fs: "FileSystem", *, as_json: bool) -> None:
    from megatrain_cli.checkpoint.diff import compare
    from megatrain_cli.report.console import data
    from megatrain_cli.report.diff_view import show_difference

    with open_given(one, fs) as left, open_given(other, fs) as right:
        found = compare(left, right, count_threads())
        if as_json:
            folders = {"left": str(left.folder), "right": str(right.folder)}
            typer.echo(json.dumps(folders | found.to_json(), indent=2))
        else:
            show_difference(found, str(left.folder), str(right.folder), data())
    _leave(0 if found.is_empty else 1)


def _check_model(folder: Path) -> None:
    if not (folder / "config.json").is_file() or not any(folder.glob("model*.safetensors")):
        raise NoCheckpointError(
            f"{folder}: no checkpoint here: wanted a `manifest.json`, a run with `checkpoints`, or "
            "a model folder with `config.json` and `model*.safetensors`"
        )


def _list_weights(folder: Path, *, as_json: bool) -> None:
    """A folder without a manifest: a model's weights."""
    from megatrain_cli.checkpoint.headers import read_folder
    from megatrain_cli.report.checkpoint_view import show_files
    from megatrain_cli.report.console import data
    from megatrain_cli.report.plan_view import say

    files = read_folder(folder)
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
        total = {key: sum(int(str(row[key])) for row in rows) for key in _SUMMED}
        values = {"folder": str(folder), "kind": "model", "files": rows, "total": total}
        typer.echo(json.dumps(values, indent=2))
        return
    say(str(folder), data())
    say("a model folder, not a checkpoint: weights only, nothing to resume", data())
    show_files(files, data())


_SUMMED = ("tensors", "parameters", "bytes")


def _is_unfinished(folder: Path) -> bool:
    """Whether it looks like a checkpoint whose manifest never came, and not like a mere model."""
    from megatrain_cli.checkpoint.names import TEMPORARY, TRAINING

    return folder.name.startswith(TEMPORARY) or (folder / TRAINING).is_dir()


def _leave(code: int) -> None:
    if code:
        raise typer.Exit(code)
