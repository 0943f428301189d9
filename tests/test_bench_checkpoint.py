"""The bench of checkpoints saves and resumes as the program does, and says so when bits differ."""

import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain_cli.pipeline import cuda_lanes
from megatrain_cli.pipeline.cuda_lanes import CudaLanes
from scripts import bench_checkpoint
from scripts.bench_checkpoint import Figures, PartFailed, measure_apart, measure_part
from scripts.checkpoint_parts import Sampled
from tests.pipeline import fake_cuda
from tests.train.workspace import one_thread

TINY = ["tiny", "--batch", "2x16", "--set", "pipeline.device=cpu", "--steps", "6", "--save-at", "3"]


@pytest.fixture(autouse=True)
def _fast() -> Iterator[None]:
    with one_thread():
        yield


def here(job: Mapping[str, object]) -> Figures:
    """In this process, with all that goes from process to process as JSON."""
    found: Figures = json.loads(json.dumps(measure_part(json.loads(json.dumps(job)))))
    return found


def bench(folder: Path, capsys: pytest.CaptureFixture[str], *args: str) -> list[dict[str, Any]]:
    bench_checkpoint.main([*TINY, "--json", "--folder", str(folder), *args], here)
    results: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return results


@pytest.mark.parametrize("streams", [False, True])
def test_a_shape_is_saved_once_with_each_pool_and_goes_on_from_the_last(
    streams: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if streams:  # those of a stand-in for a GPU: updates and copies have threads of their own
        monkeypatch.setattr(cuda_lanes, "cuda", fake_cuda)
        lanes = partial(CudaLanes, torch.device("cpu"))
        monkeypatch.setattr("megatrain_cli.train.assemble.InlineLanes", lanes)
    [result] = bench(tmp_path, capsys, "--pool", "0", "auto")
    assert result["reason"] == ""
    without, pooled = result["saves"]["figures"]
    assert (without["pool_bytes"], pooled["pool_bytes"] > 0) == (0, True)
    assert without["step"] == 3
    assert pooled["step"] >= 3 + 1 + 3  # one step beside the first save, three after it
    assert without["num_bytes"] == pytest.approx(pooled["num_bytes"], rel=0.01)
    for save in (without, pooled):
        assert save["steps_during"] >= 1
        assert save["seconds"] > save["stall_seconds"] >= 0
        assert save["allowed_host_bytes"] == save["pool_bytes"] + (64 << 20)
        assert save["longest_during"] >= save["seconds_during"] > 0
    lazy, eager = result["resumes"]
    assert (lazy["eager"], eager["eager"]) == (False, True)
    for one in (lazy, eager):
        assert one["losses"] == one["wanted"]
        assert len(one["losses"]) == 2
        assert one["num_bytes"] > 12 * 80_000  # all tensors of the tiny shape
        assert one["first_bytes"] >= one["least_bytes"] > 0
        assert 0 < one["first_seconds"] < one["step_seconds"]
    assert eager["first_bytes"] == eager["num_bytes"]
    assert list(tmp_path.iterdir()) == []


def test_tables_have_a_cell_for_every_column_and_tell_losses_that_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = float(math.pi).hex()

    def forgetful(job: Mapping[str, object]) -> Figures:
        found = dict(here(job))
        if job["part"] == "lazy":
            found["losses"] = [wrong, *found["losses"][1:]]
        return found

    bench_checkpoint.main([*TINY, "--folder", str(tmp_path)], forgetful)
    saves, resumes, notes, legend = capsys.readouterr().out.split("\n\n")
    for table in (saves, resumes):
        assert len({line.count("|") for line in table.splitlines()}) == 1
    cells = [line.split(" | ")[-1] for line in resumes.splitlines()[2:]]
    assert cells == ["NO |", "yes |"]
    assert f"{wrong} (not " in notes
    assert "times as early" in notes
    for column in ("extra host", "page cache", "stall", "first compute", "least", "ready"):
        assert column in legend


def test_a_part_that_fails_says_why_and_the_next_shape_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(job: Mapping[str, object]) -> Figures:
        if job["shape"] == "tiny:1":
            raise PartFailed("saves: the process ended with -9")
        return here(job)

    words = ["tiny:1", *TINY, "--no-resume", "--folder", str(tmp_path)]
    bench_checkpoint.main([*words, "--json"], failing)
    bad, good = json.loads(capsys.readouterr().out)
    assert (bad["saves"], bad["reason"]) == (None, "saves: the process ended with -9")
    assert (good["reason"], good["resumes"]) == ("", [])
    bench_checkpoint.main(["tiny:1", "--folder", str(tmp_path)], failing)
    assert "tiny:1: saves: the process ended with -9." in capsys.readouterr().out


def test_each_part_has_a_process_of_its_own_and_its_failure_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That process takes seconds to begin: a stand-in hands over what the script finds here."""
    script, stand_in, found = bench_checkpoint.__file__, tmp_path / "part.py", tmp_path / "found"
    saves = tmp_path / "saves"
    saves.mkdir()
    monkeypatch.setattr(bench_checkpoint, "__file__", str(stand_in))

    def apart(job: Mapping[str, object]) -> Figures:
        bench_checkpoint.main(["--job", json.dumps(job), "--out", str(found)])
        stand_in.write_text(
            f"import json, shutil, sys\nassert json.loads(sys.argv[2]) == {dict(job)}\n"
            f"shutil.copy({str(found)!r}, sys.argv[4])\n"
        )
        return measure_apart(job)

    words = [*TINY, "--no-resume", "--json", "--folder", str(saves)]
    bench_checkpoint.main(words, apart)
    [done] = json.loads(capsys.readouterr().out)
    assert done["saves"]["figures"][0]["step"] == 3
    stand_in.write_text("raise SystemExit(1)")
    bench_checkpoint.main(words)
    [refused] = json.loads(capsys.readouterr().out)
    assert (refused["saves"], refused["reason"]) == (None, "saves: the process ended with 1")
    assert list(saves.iterdir()) == []
    command = [sys.executable, script, "--save-at", "3"]
    alone = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)
    assert alone.returncode == 2
    assert "wanted a shape" in alone.stderr


@pytest.mark.parametrize(
    "wrong",
    [["--save-at", "2"], ["--steps", "7", "--save-at", "6"], ["--pool", "many"], ["--batch", "8"]],
)
def test_what_cannot_be_measured_is_refused(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench_checkpoint.main(["tiny", *wrong])
    assert wrong[0] in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench_checkpoint.main([])
    assert "wanted a shape" in capsys.readouterr().err


def test_samples_tell_the_growth_and_what_was_there_before_a_time() -> None:
    values = iter([5, 7, 3])
    sampled = Sampled(lambda: next(values, 4), 0.0001)
    with sampled:
        while len(sampled.points) < 5:
            assert time.perf_counter() - sampled.points[0][0] < 60
    assert [value for _, value in sampled.points[:4]] == [5, 7, 3, 4]
    assert sampled.growth == 2
    assert sampled.at(sampled.points[1][0]) == 7
    assert sampled.at(math.inf) == 4
