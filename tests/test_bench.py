"""The benches measure what they say: published shapes, the same tokens, the program's own loop."""

import argparse
import json
import signal
import subprocess
import sys
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.config.load import load_config
from megatrain_cli.model.discover import discover
from megatrain_cli.plan.rates import LinkRate
from megatrain_cli.train.assemble import prepare
from scripts import bench_step
from scripts.bench_peers import NAMES, OURS, measure_ours, measure_peer, why_not
from scripts.bench_run import Figures, RandomRows, Result, Variant
from scripts.link_use import link_use
from scripts.shapes import (
    SHAPES,
    Batch,
    make_documents,
    make_tokens,
    parse_batch,
    parse_shape,
    write_model,
)

PEERS_SCRIPT = Path(__file__).parents[1] / "scripts" / "bench_peers.py"


def run_bench(capsys: pytest.CaptureFixture[str], *args: str) -> list[dict[str, object]]:
    bench_step.main([*args, "--steps", "3", "--json"])
    results: list[dict[str, object]] = json.loads(capsys.readouterr().out)
    return results


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_as_many_parameters_as_its_model(name: str, tmp_path: Path) -> None:
    shape = parse_shape(f"{name}:2")
    write_model(tmp_path, shape)
    spec = discover(tmp_path, dtype=torch.bfloat16, attention="sdpa").spec
    assert (spec.num_parameters, len(spec.decoder_layers)) == (shape.parameters, 2)
    assert parse_shape(name).parameters > 0


@pytest.mark.parametrize(
    ("name", "published"),
    [("0.5b", 494_032_768), ("7b", 7_615_616_512), ("8b", 8_030_261_248), ("70b", 70_553_706_496)],
)
def test_whole_shapes_have_the_published_number_of_parameters(name: str, published: int) -> None:
    assert SHAPES[name].parameters == published


@pytest.mark.parametrize("text", ["4b", "3b:", "3b:0", "3b:x", ""])
def test_what_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="3b"):
        parse_shape(text)


@pytest.mark.parametrize("text", ["8", "8x", "0x8", "8x8x8", "8X8"])
def test_what_is_no_batch_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="ROWSxLENGTH"):
        parse_batch(text)


def test_documents_fill_their_rows_in_order_with_about_the_asked_length() -> None:
    numbers = make_documents(Batch(5, 400), 20, step=3)
    assert numbers.shape == (5, 400)
    assert numbers.dtype == np.int32
    for row in numbers:
        assert row[0] == 0
        assert set(np.diff(row)) <= {0, 1}
        lengths = np.bincount(row)[:-1]  # the last one is cut
        assert lengths.min() >= 10
        assert lengths.max() <= 30


@pytest.mark.parametrize("accumulation", [1, 3])
def test_micro_batches_are_the_tokens_that_the_peers_get(accumulation: int, tmp_path: Path) -> None:
    shape, batch = SHAPES["tiny"], Batch(6, 16)
    write_model(tmp_path / "model", shape)
    config = {
        "model": {"path": "model", "init": "random"},
        "data": {"train": "rows.jsonl", "max_length": 16},
        "train": {
            "output_dir": "run",
            "max_steps": 2,
            "micro_batch_size": 6 // accumulation,
            "gradient_accumulation_steps": accumulation,
        },
        "pipeline": {"device": "cpu"},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    decisions = prepare(load_config(tmp_path / "config.yaml"))[1].decisions
    rows = RandomRows(shape, Variant(batch, accumulation), decisions, total_steps=2)
    steps = [rows.of_step(index) for index in range(2)]
    for index, step in enumerate(steps):
        assert len(step.micro_batches) == decisions.num_micro_batches
        joined = np.concatenate([micro.input_ids for micro in step.micro_batches])
        assert np.array_equal(joined, make_tokens(shape, batch, index))
        assert all((m.labels == m.input_ids).all() for m in step.micro_batches)
    first, second = (step.micro_batches[0].input_ids for step in steps)
    assert not np.array_equal(first, second)


def test_runs_share_a_store_until_one_wants_another(capsys: pytest.CaptureFixture[str]) -> None:
    variants = [
        "optimizer.master=fp32_split",
        "pipeline.staging_buffers=3",
        "optimizer.master=bf16",
    ]
    asked = [word for variant in variants for word in ("--variant", variant)]
    results = run_bench(capsys, "tiny", "--batch", "2x16", "--set", "pipeline.device=cpu", *asked)
    assert {frozenset(result) for result in results} == {
        frozenset(field.name for field in fields(Result))
    }
    figures = [result["figures"] for result in results]
    for found in figures:
        assert isinstance(found, dict)
        assert found.keys() == {field.name for field in fields(Figures)}
        assert found["parameters"] == SHAPES["tiny"].parameters
        assert found["host_step_bytes"] <= found["host_peak_bytes"]
        assert {"forward", "backward", "update"} <= found["phases"].keys()
    found = [figure for figure in figures if isinstance(figure, dict)]
    assert [one["fresh"] for one in found] == [True, False, True]
    assert [one["first"] for one in found] == [True, False, False]


def test_a_run_that_fails_says_why_and_the_others_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--variant", "pipeline.staging_buffers=none", "--variant", "pipeline.device=cpu"]
    refused, done = run_bench(capsys, "tiny", "--batch", "1x8", *asked)
    assert refused["figures"] is None
    assert "pipeline.staging_buffers" in str(refused["reason"])
    assert (done["reason"], done["figures"] is None) == ("", False)


def test_tables_have_a_cell_for_every_column(capsys: pytest.CaptureFixture[str]) -> None:
    bad, good = "pipeline.staging_buffers=none", "pipeline.device=cpu"
    bench_step.main(["tiny", "--batch", "1x8", "--steps", "3", "--variant", bad, "--variant", good])
    *tables, legend = capsys.readouterr().out.split("\n\n")
    assert len(tables) == 2
    assert [column for column in bench_step.SPEEDS if column not in legend] == []
    for table in tables:
        assert all(
            above.count("|") == below.count("|") for above, below in pairwise(table.splitlines())
        )


def row(*, first: bool) -> dict[str, str]:
    """What the table shows of a run that measured 1 GiB, 2 GiB and so on."""
    values: dict[str, Any] = {f.name: i << 30 for i, f in enumerate(fields(Figures), start=1)}
    values |= {"first": first, "floor_part": "link", "phases": {}, "breakdown": {}}
    result = Result("3b", "8x1024", Figures(**values))
    head, _, cells = (line.split(" | ") for line in bench_step.speeds([result]).splitlines())
    return dict(zip(head, cells, strict=True))


def test_only_the_first_run_of_a_process_is_held_against_the_plan_of_the_host() -> None:
    first, later = row(first=True), row(first=False)
    differing = {name: later[name] for name in first if first[name] != later[name]}
    assert differing == {name: f"({first[name]})" for name in ("host GiB", "in steps")}


LINK = (LinkRate(1 << 20, 2e9, 9e9, 1e9), LinkRate(1 << 24, 10e9, 8e9, 5e9))


@given(*[st.floats(0.01, 10.0)] * 3, st.floats(0.01, 1.0), st.floats(0.01, 1.0))
def test_a_link_is_used_as_far_as_it_carries_its_peak(
    there: float, back: float, both: float, share_in: float, share_out: float
) -> None:
    """Alone at the peak of that direction, and both ways at the peak of both, is all of it."""
    parts = {
        "stream_in_seconds": there + both,
        "stream_in_bytes": share_in * (there * 10e9 + both * 5e9),
        "stream_out_seconds": back + both,
        "stream_out_bytes": share_out * (back * 9e9 + both * 5e9),
        "both_ways_seconds": both,
    }
    assert link_use(parts, LINK) == pytest.approx((share_in, share_out))


def test_a_link_without_copies_is_not_used() -> None:
    parts = {
        f"{way}_{unit}": 0.0 for way in ("stream_in", "stream_out") for unit in ("seconds", "bytes")
    }
    assert link_use({**parts, "both_ways_seconds": 0.0}, LINK) == (0.0, 0.0)


@pytest.mark.parametrize(
    "wrong", [["--steps", "0"], ["--packed", "0"], ["--batch", "3x8", "--accumulation", "2"]]
)
def test_what_cannot_be_measured_is_refused(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench_step.main(["tiny", *wrong])
    assert wrong[-2] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "said", "reason"),
    [
        (None, "step 3", "timed out after 60 s"),
        (-signal.SIGKILL, "torch.OutOfMemoryError", "out of host memory (killed)"),
        (1, "x\ntorch.OutOfMemoryError: CUDA out of memory.", "out of GPU memory"),
        (1, "RuntimeError: CUDA error: out of memory", "out of host memory (page-locking was re"),
        (1, "RuntimeError: [enforce fail] DefaultCPUAllocator: can't", "out of host memory (refu"),
        (1, "ModuleNotFoundError: No module named 'hjson'", "not installed (No module named 'hj"),
        (1, "Traceback\nValueError: a\n\n", "failed with 1: ValueError: a"),
        (0, "", "failed with 0: it said nothing"),
    ],
)
def test_why_a_peer_has_no_figures(code: int | None, said: str, reason: str) -> None:
    assert why_not(code, said, 60).startswith(reason)


def peers(*args: str) -> list[dict[str, object]]:
    done = subprocess.run(
        [sys.executable, str(PEERS_SCRIPT), "tiny", "--steps", "3", "--json", *args],
        check=True,
        capture_output=True,
        text=True,
    )
    results: list[dict[str, object]] = json.loads(done.stdout)
    return results


@pytest.mark.slow
# transformers 5.2x warns of the name that the range of versions has in common.
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_peers_start_from_the_loss_of_random_weights(tmp_path: Path) -> None:
    """Near ln 512 = 6.24 for all of them, or they do other work.

    FSDP2 makes a group of its process, so here it has one; the others do without.
    """
    shape, batches = SHAPES["tiny"], [Batch(2, 32)]
    measure_ours(shape, batches, 3, tmp_path / OURS)
    for name in ("resident", "resident-fp32"):
        measure_peer(name, shape, batches, 3, tmp_path / name)
    figures = [json.loads(path.read_text()) for path in tmp_path.iterdir()]
    [result] = peers("--batch", "2x32", "--peers", "fsdp2")
    assert isinstance(result["figures"], dict), result["reason"]
    assert {*(path.name for path in tmp_path.iterdir()), "fsdp2", "deepspeed"} == {*NAMES}
    for found in (*figures, result["figures"]):
        assert abs(found["first_loss"] - np.log(512)) < 0.1


def test_a_peer_is_ended_at_its_limit() -> None:
    [one, other] = peers("--batch", "1x8", "2x8", "--peers", "resident", "--limit", "0.01")
    assert one["reason"] == other["reason"] == "timed out after 0 s"
