"""All that two runs share if they are the same one: every number of every step, every tensor."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatrain_cli.checkpoint.diff import compare
from megatrain_cli.checkpoint.folder import open_checkpoint
from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.report.journal import read_journal
from tests.checkpoint.tiles import manifest_of, payloads

# Where the machine stood when the plan was made, and where the run lies.
OF_ITS_TIME = ("training/config.yaml", "training/plan.json")


@dataclass(frozen=True)
class Differences:
    """Where two runs part; empty and false if they do not.

    Attributes:
        step: The first of which a number differs, or that only one of them has.
        numbers: What differs there.
        tensors: Of the last checkpoints, with the first byte that differs.
        facts: Of the last checkpoints' manifests.
    """

    step: int | None
    numbers: tuple[str, ...]
    tensors: tuple[str, ...]
    facts: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.step or self.tensors or self.facts)


def steps_of(run: Path) -> list[dict[str, object]]:
    """The numbers of the journal that do not depend on the clock, floats to the last bit."""
    return [
        {
            "step": record.step,
            "loss": record.loss.hex(),
            "grad_norm": record.grad_norm.hex(),
            "learning_rate": float(record.learning_rate).hex(),
            "tokens": record.tokens,
            "rows": record.rows,
            "epoch": float(record.epoch).hex(),
        }
        for record in read_journal(run / "metrics.jsonl")
    ]


def checkpoints(run: Path) -> list[Path]:
    """Of a run, by step."""
    return sorted((run / "checkpoints").glob("step-*"))


def differences(one: Path, other: Path) -> Differences:
    """Compare two run folders."""
    step: int | None = None
    numbers: tuple[str, ...] = ()
    lefts, rights = steps_of(one), steps_of(other)
    for number, (left, right) in enumerate(zip(lefts, rights, strict=False), 1):
        if left != right:
            step = number
            numbers = tuple(key for key in left if left[key] != right[key])
            break
    if step is None and len(lefts) != len(rights):
        step, numbers = min(len(lefts), len(rights)) + 1, ("step",)
    ends = checkpoints(one)[-1], checkpoints(other)[-1]
    return Differences(step, numbers, differing_tensors(*ends), differing_facts(*ends))


def differing_tensors(one: Path, other: Path) -> tuple[str, ...]:
    """Every tensor that two checkpoints do not share, by the files' bytes behind the headers."""
    lefts, rights = payloads(one), payloads(other)
    found = [f"{file}: in one alone" for file in lefts.keys() ^ rights.keys()]
    for part in manifest_of(one).parts:
        left, right = lefts[part.file], rights.get(part.file)
        if right is None or left == right:
            continue
        if len(left) != len(right):
            found.append(f"{part.file}: {len(left)} and {len(right)} bytes")
            continue
        unequal = np.frombuffer(left, np.uint8) != np.frombuffer(right, np.uint8)
        for place in part.tensors:
            here = np.flatnonzero(unequal[place.start : place.end])
            if len(here):
                found.append(f"{place.name}: from byte {here[0]}")
    return tuple(found)


def differing_facts(one: Path, other: Path) -> tuple[str, ...]:
    """What two checkpoints say of their runs beside the tensors, and their other files."""
    fs = FileSystem()
    with open_checkpoint(one, fs) as left, open_checkpoint(other, fs) as right:
        found = compare(left, right, threads=1)
    # How it was planned is none of what was computed.
    state = [fact for fact in found.facts if not fact[0].startswith("plan.")]
    facts = [f"{key}: {left!a} and {right!a}" for key, left, right in state]
    return (*facts, *(name for name in found.aux if name not in OF_ITS_TIME))
