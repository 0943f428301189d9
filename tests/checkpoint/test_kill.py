"""A process killed while it saves, again and again, never breaks or loses a checkpoint.

This shows order and visibility on the real file system; what a power cut leaves is for
`test_crash.py`, since the page cache outlives a killed process.
"""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint.crashes import tree_at
from tests.checkpoint.saves import checkpoints_in

ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("MEGATRAIN_KILLS", "20"))


def kill_once(run: Path, mode: str, first: int, rng: random.Random) -> list[tuple[str, int]]:
    """Kill a process some moment after it said some lines; what it said."""
    code = "import sys; from tests.checkpoint.saving_child import main; main(*sys.argv[1:])"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(run), mode, str(first)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as child:
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(rng.randint(1, 5))]
        try:
            child.wait(rng.uniform(0, 0.02))
        except subprocess.TimeoutExpired:
            child.kill()
        lines += child.stdout.readlines()
    assert child.returncode == -9, "it ended by itself"
    said = [line.split() for line in lines if line.endswith("\n")]
    return [(kind, int(step)) for kind, step in said]


def damage(run: Path, said: list[tuple[str, int]]) -> list[str]:
    """What is broken or lost in a run that was killed."""
    found = checkpoints_in(tree_at(run))
    broken = [f"{step} is {state}" for step, state in found.items() if state != "whole"]
    retired = {step for kind, step in said if kind == "retired"}
    kept = {step for kind, step in said if kind == "committed"} - retired
    return broken + [f"{step} is lost" for step in kept if step not in found]


@pytest.mark.slow
def test_no_kill_breaks_or_loses_a_checkpoint(tmp_path: Path) -> None:
    rng = random.Random(7)
    said: list[tuple[str, int]] = []
    interrupted = 0
    for _ in range(KILLS):
        newest = max((step for kind, step in said if kind == "committed"), default=0)
        found = checkpoints_in(tree_at(tmp_path))
        said += kill_once(tmp_path, "by the protocol", max([newest, *found]) + 1, rng)
        assert damage(tmp_path, said) == []
        interrupted += any(tmp_path.glob("checkpoints/.*"))
    assert said.count(("begins", 0)) == KILLS
    assert len(said) > 2 * KILLS, "most processes saved something before they were killed"
    assert interrupted > KILLS / 4, "many were killed in the middle of a save"


@pytest.mark.slow
def test_the_same_kills_break_a_run_that_writes_in_place(tmp_path: Path) -> None:
    rng = random.Random(7)
    for index in range(40):
        run = tmp_path / str(index)
        run.mkdir()
        if damage(run, kill_once(run, "in place", 1, rng)):
            return
    pytest.fail("no kill of 40 came between two files")
