"""A run that is killed again and again, at any moment, ends as one that never was.

Kills are real: SIGKILL to the whole process, while it starts, loads, steps, saves or tidies up.
What a power cut leaves is for `tests/checkpoint/test_crash.py`.
"""

import os
import random
import re
import shutil
from pathlib import Path

import pytest

from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.checkpoint.resolve import candidates
from tests.checkpoint.tiles import payloads
from tests.train.broken import LIFE
from tests.train.prepared import Child, Prepared
from tests.train.test_run import journal_of
from tests.train.workspace import make_workspace

KILLS = int(os.environ.get("MEGATRAIN_KILLS", "20"))
BROKEN = "tests.train.broken:"
STEPS = f"{BROKEN}five_steps_and_no_more"  # in each life: so no run ends before the last kill
IN_PLACE = f"{BROKEN}publish_before_all_is_written"


def kill_once(child: Child, rng: random.Random) -> None:
    """Kill it at a drawn moment: of its start, or right after one of its first steps."""
    count, seconds = (0, 1.0) if rng.random() < 0.2 else (rng.randint(1, LIFE - 1), 0.02)
    killed = child.kill_after("targets/s", count, rng.uniform(0, seconds))
    assert killed, f"it ended by itself:\n{child.text}"


def damage(run: Path, said: str) -> list[str]:
    """What is broken, and what was said to be saved and is neither there nor followed."""
    found = candidates(run, FileSystem())
    broken = [f"{one.folder.name}: {one.problem}" for one in found if one.problem is not None]
    newest = max((one.step for one in found if one.problem is None), default=-1)
    acknowledged = max(map(int, re.findall(r"saved \S+/step-(\d+) \(", said)), default=-1)
    lost = [f"step {acknowledged} is lost"] if acknowledged > newest else []
    return broken + lost


@pytest.mark.slow
def test_a_run_killed_again_and_again_ends_as_one_that_never_was(
    server: Prepared, tmp_path: Path
) -> None:
    steps = KILLS * LIFE
    config = make_workspace(
        tmp_path,
        train={"max_steps": steps},
        data={"shuffle": True},
        model={"layers": 2},
        schedule={"type": "cosine"},
        checkpoint={"save_steps": 1},
    )
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert server.run("train", config, f"train.output_dir={whole}").end() == 0
    rng, left = random.Random(11), set[str]()
    for _ in range(KILLS):
        begun = bool(candidates(run, FileSystem()))
        if not begun and run.exists():
            shutil.rmtree(run)  # nothing was saved, so it begins once more
        args = ("resume", run) if begun else ("train", config)
        child = server.start(*args, broken=[STEPS])
        kill_once(child, rng)
        assert damage(run, child.text) == []
        left |= {path.name[:5] for path in run.glob("checkpoints/.*")}
    last = server.run("resume", run)
    assert last.end() == 0, last.text
    name = f"step-{steps:08d}"
    assert payloads(run / "checkpoints" / name) == payloads(whole / "checkpoints" / name)
    losses = [(record["step"], record["loss"]) for record in journal_of(run)]
    assert losses == [(record["step"], record["loss"]) for record in journal_of(whole)]
    assert ".tmp-" in left, "no kill came in the middle of a save"
    assert not list(run.glob("checkpoints/.*")), "what killed saves left was removed"


@pytest.mark.slow
def test_the_same_kills_break_a_run_that_publishes_too_early(
    server: Prepared, tmp_path: Path
) -> None:
    config = make_workspace(
        tmp_path, train={"max_steps": 9}, model={"layers": 2}, checkpoint={"save_steps": 1}
    )
    rng = random.Random(11)
    for index in range(20):
        run = tmp_path / str(index)
        child = server.start("train", config, f"train.output_dir={run}", broken=[STEPS, IN_PLACE])
        kill_once(child, rng)
        if damage(run, child.text):
            return
    pytest.fail("no kill of 20 came in the middle of a save")
