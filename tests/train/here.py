"""Whole runs in this process."""

from pathlib import Path

from megatrain_cli.config.load import load_config
from megatrain_cli.report.console import RunConsole
from megatrain_cli.train.resume import ResumeRequest
from megatrain_cli.train.session import resume, train
from tests.train.workspace import one_thread


def train_here(config: Path, *overrides: str) -> None:
    """`megatrain train CONFIG OVERRIDES`."""
    with RunConsole() as console, one_thread():
        train(load_config(config, overrides), console)


def resume_here(
    run: Path, *overrides: str, steps: int | None = None, fork: Path | None = None
) -> None:
    """`megatrain resume RUN OVERRIDES`."""
    with RunConsole() as console, one_thread():
        resume(ResumeRequest(run, overrides, steps=steps, fork=fork), console)
