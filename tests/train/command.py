"""The command line, as a user's shell runs it."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_command(*args: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `megatrain ARGS` in a process of its own, to its end."""
    return subprocess.run(
        [sys.executable, "-m", "megatrain_cli", *map(str, args)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        check=False,
        text=True,
        # So that a carriage return stays one.
        encoding="utf-8",
        errors="strict",
        timeout=600,
    )
