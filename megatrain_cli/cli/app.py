"""The `megatrain` command, and the one place that turns errors into exit codes.

Importing this module must stay cheap: each command imports what it needs when it runs.
"""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from megatrain_cli import __version__
from megatrain_cli.cli import data, export, inspect, plan, probe, resume, train
from megatrain_cli.cli.options import TAKES_OVERRIDES
from megatrain_cli.errors import (
    ConfigError,
    DeviceError,
    InternalError,
    MegatrainError,
    StorageError,
)
from megatrain_cli.report.listener import Listener
from megatrain_cli.signals import decide_end

_EPILOG = (
    "Exit codes: 0 done; 1 wrong config, data or model, or it does not fit; 2 wrong usage; "
    "3 damaged file; 4 file of another kind; 5 no checkpoint; 6 run folder in use; 7 disk; "
    "8 numbers not finite; 9 device; 10 hung; 70 a bug; 75 stopped on request and saved; 129, "
    "130, 131, 142, 143 and 152 stopped, nothing saved."
)

# Plain text instead of rich panels: half the start-up time, and no box drawing in a log.
app = typer.Typer(
    name="megatrain",
    help="Train every parameter of a language model that does not fit on the GPU.",
    epilog=_EPILOG,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command("plan", context_settings=TAKES_OVERRIDES)(plan.plan)
app.command("train", context_settings=TAKES_OVERRIDES)(train.train)
app.command("resume", context_settings=TAKES_OVERRIDES)(resume.resume)
app.command("probe")(probe.probe)
app.command("inspect-ckpt")(inspect.inspect_ckpt)
app.command("export")(export.export)
app.add_typer(data.app, name="data")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"megatrain {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Train every parameter of a language model that does not fit on the GPU."""
    try:
        Path.cwd()
    except FileNotFoundError:
        # Relative paths have no place, and torch's libraries abort the process as they load.
        raise ConfigError(
            "The working folder was removed. Go to one that is there: `cd` to its full path."
        ) from None


def main() -> None:
    """Run the command line of this process and leave with its exit code.

    Typer itself ends usage errors with 2 and a closed pipe with 1. An exception that is none of
    ours is a bug and keeps its traceback.
    """
    try:
        app(prog_name="megatrain")
    except InternalError:
        typer.echo("megatrain: a bug in this program, please report it with what follows", err=True)
        sys.excepthook(*sys.exc_info())
        sys.exit(InternalError.exit_code)
    except MegatrainError as error:
        said = Listener()
        said.write(f"{error}\n")
        decide_end(error.exit_code, "")
        if isinstance(error, DeviceError) and _has_used_a_device():
            # Destructors would ask it once more, and an error there aborts the process from C++.
            said.flush()
            os._exit(error.exit_code)
        sys.exit(error.exit_code)
    except OSError:
        refused = _refusal_of_stdout()
        if refused is None:
            raise
        Listener().write(f"stdout cannot be written: {refused}. What was asked for is not whole.\n")
        sys.exit(StorageError.exit_code)


def _refusal_of_stdout() -> str | None:
    """Why stdout does not take one more line end; None if it does.

    What its buffer holds then goes nowhere, or Python would complain once more as it leaves.
    """
    try:
        if sys.stdout is not None:
            sys.stdout.write("\n")
            sys.stdout.flush()
    except OSError as error:
        nobody = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nobody, sys.stdout.fileno())
        os.close(nobody)
        return error.strerror
    return None


def _has_used_a_device() -> bool:
    """Whether this process has a CUDA context; torch may never have been imported."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())
