"""A process that saves without end until it is killed: `main(RUN, MODE, FIRST)`.

The mode is `by the protocol` or `in place`. Prints a line when it begins, when it has committed a
step and before it retires one.
"""

import sys
from pathlib import Path

from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.checkpoint.remove import remove_leftovers
from tests.checkpoint.saves import save, save_in_place

# Large enough that most kills come while something is written.
SIZE = 300_000


def say(kind: str, step: int) -> None:
    sys.stdout.write(f"{kind} {step}\n")
    sys.stdout.flush()


def main(run: str, mode: str, first: str) -> None:
    fs, checkpoints = FileSystem(), Path(run) / "checkpoints"
    say("begins", 0)
    remove_leftovers(fs, checkpoints)
    step = int(first)
    while True:
        if mode == "in place":
            save_in_place(fs, checkpoints, step, say, size=SIZE)
        else:
            save(fs, checkpoints, step, say, size=SIZE, keep=2)
        step += 1
