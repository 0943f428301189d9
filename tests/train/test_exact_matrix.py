"""P9 for every way to keep masters, to update and to count, over three families."""

from pathlib import Path

import pytest

from megatrain_cli.errors import Stopped
from tests.checkpoint.tiles import manifest_of
from tests.train.same_runs import checkpoints, differences
from tests.train.whole_runs import SPLIT, Runs, stop
from tests.train.workspace import make_workspace

MASTERS = {
    "float32": ("model.dtype=float32", "optimizer.master=fp32"),
    "split": SPLIT,
    "fp32": ("model.dtype=bfloat16", "optimizer.master=fp32"),
    "bf16": ("model.dtype=bfloat16", "optimizer.master=bf16"),
    "stochastic": ("model.dtype=bfloat16", "optimizer.master=bf16_stochastic"),
}
UPDATES = {
    "deferred": ("optimizer.update=deferred",),
    "eager": ("optimizer.update=eager", "optimizer.max_grad_norm=null"),
}
LENGTHS = {
    "steps": ("train.max_steps=5",),
    # 9 rows, 4 a step: the last step has one.
    "epochs": ("train.max_steps=null", "train.num_epochs=1.4"),
}
FAMILIES = {
    "llama": {},
    "gpt2": {"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1},
    "qwen3": {},
}
# All pairs of masters with updates, and of families with everything else.
CASES = [
    ("llama", "float32", "deferred", "steps"),
    ("qwen3", "float32", "eager", "epochs"),
    ("gpt2", "split", "eager", "epochs"),
    ("llama", "split", "deferred", "epochs"),
    ("qwen3", "split", "deferred", "steps"),
    ("llama", "fp32", "eager", "steps"),
    ("gpt2", "fp32", "deferred", "epochs"),
    ("gpt2", "bf16", "deferred", "steps"),
    ("qwen3", "bf16", "eager", "steps"),
    ("llama", "stochastic", "eager", "epochs"),
    ("gpt2", "stochastic", "deferred", "steps"),
    ("qwen3", "stochastic", "deferred", "epochs"),
]


@pytest.mark.parametrize(("kind", "master", "update", "length"), CASES)
def test_a_run_resumed_twice_ends_as_one_that_was_not(
    kind: str, master: str, update: str, length: str, tmp_path: Path
) -> None:
    config = make_workspace(
        tmp_path,
        kind,
        tied=kind != "llama",
        rows=9 if length == "epochs" else 12,
        model={"layers": 2, **FAMILIES[kind]},
        data={"shuffle": True},
        train={"micro_batch_size": 2, "gradient_accumulation_steps": 2},
        schedule={"type": "linear", "warmup_ratio": 0.3},
        checkpoint={"keep_last": 9},
    )
    runs = Runs(config, (*MASTERS[master], *UPDATES[update], *LENGTHS[length]))
    whole = runs.train("whole")
    once = dict(runs.taken)
    del runs.taken[:]
    run = runs.train("run", after={1: stop}, ends=Stopped)
    runs.resume(run, after={3: stop}, ends=Stopped)
    runs.resume(run)
    assert not differences(whole, run)
    assert dict(runs.taken) == once
    # No step is without effect: what is equal here could differ.
    first, *_, last = (manifest_of(path) for path in checkpoints(run))
    assert all(a.xxh3_128 != b.xxh3_128 for a, b in zip(first.parts, last.parts, strict=True))
