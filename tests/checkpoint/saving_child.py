"""A process that saves without end until it is killed: `python saving_child.py RUN MODE FIRST`.

Prints a line when it begins, commits and retires, each only once that is so.
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
            save(fs, checkpoints, step, say, size=SIZE, keep=2, atomic_rename=mode == "rename")
        step += 1


if __name__ == "__main__":
    main(*sys.argv[1:])
