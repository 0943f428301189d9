"""The command line, as a user's shell runs it."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def start_command(*args: str | Path) -> subprocess.Popen[str]:
    """Start `megatrain ARGS` in a process of its own; output goes to pipes."""
    return subprocess.Popen(
        [sys.executable, "-m", "megatrain_cli", *map(str, args)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # So that a carriage return stays one.
        encoding="utf-8",
        errors="strict",
    )


def run_command(*args: str | Path) -> subprocess.CompletedProcess[str]:
    """Run it to its end."""
    process = start_command(*args)
    out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
