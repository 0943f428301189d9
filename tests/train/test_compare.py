"""A run ends with what it took beside what was planned, and says where the plan was wrong."""

from pathlib import Path

import pytest

from megatrain_cli.probe.peaks import host_peak_bytes
from megatrain_cli.train import compare
from megatrain_cli.train.compare import (
    Compared,
    lines_of,
    measured_beside_planned,
    waited_for_data,
)
from tests.plan.small import CPU, GPU, make_spec, plan_for
from tests.train.here import train_here
from tests.train.test_forecast import of, planned, skeleton_of
from tests.train.workspace import make_workspace

GIB = 1 << 30


@pytest.mark.parametrize(
    ("share", "said"),
    [(1.0, None), (1.04, None), (0.985, None), (1.06, "6% too much"), (0.97, "3% too little")],
)
def test_a_second_line_names_bytes_five_percent_above_or_two_below(
    share: float, said: str | None
) -> None:
    first, *rest = lines_of([Compared("host RAM", share * 10 * GIB, 10 * GIB)])
    assert first.endswith(" GiB planned, 10.0 GiB measured")
    expected = [] if said is None else [f"not as planned: the plan had {said} for host RAM"]
    assert rest == expected


def test_figures_share_a_line_and_those_that_are_wrong_another() -> None:
    figures = [
        Compared("host RAM", 2 * GIB, 2 * GIB),
        Compared("GPU memory", 3 * GIB, 4 * GIB),
        Compared("a step", 1.0, 1.25, is_bytes=False),
    ]
    assert lines_of(figures) == [
        (
            "host RAM 2.00 GiB planned, 2.00 GiB measured; GPU memory 3.00 GiB planned, 4.00 GiB "
            "measured; a step 1 s planned, 1.25 s measured"
        ),
        "not as planned: the plan had 25% too little for GPU memory, 20% too little for a step",
    ]
    assert lines_of([]) == []


def test_what_was_not_planned_is_never_wrong() -> None:
    (line,) = lines_of([Compared("a step", None, 1.2, is_bytes=False)])
    assert line == "a step 1.2 s measured, not planned without the rates of `megatrain probe`"


def test_the_first_step_counts_only_where_it_is_the_only_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = planned("3b", 8, 1024, 5e9, {})
    spec = skeleton_of("3b").spec
    seconds = of("3b", plan).step_seconds
    monkeypatch.setattr(compare, "host_peak_bytes", lambda: plan.host_bytes)
    monkeypatch.setattr(compare, "gpu_peak_bytes", lambda: plan.device_bytes)
    (line,) = measured_beside_planned(plan, spec, [90.0, seconds, seconds, 50.0])
    assert f"a step {seconds:.3g} s planned, {seconds:.3g} s measured" in line
    assert "GPU memory" in line
    assert len(measured_beside_planned(plan, spec, [90.0])) == 2
    (line,) = measured_beside_planned(plan, spec, [])
    assert "a step" not in line


@pytest.mark.parametrize("peak", [None, 10 * GIB])
def test_without_a_resident_set_nothing_is_said_of_it(
    peak: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "host_peak_bytes", lambda: peak)
    spec = make_spec()
    lines = measured_beside_planned(plan_for(spec, CPU), spec, [])
    assert bool(lines) is (peak is not None)
    monkeypatch.setattr(compare, "gpu_peak_bytes", lambda: GIB)
    assert "GPU memory" in measured_beside_planned(plan_for(spec, GPU), spec, [])[0]


def test_the_peak_is_the_kernels(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tx\nVmHWM:\t    2048 kB\nVmRSS:\t 1024 kB\n")
    assert host_peak_bytes(status) == 2 << 20
    status.write_text("Name:\tx\n")
    assert host_peak_bytes(status) is None
    assert host_peak_bytes(tmp_path / "none") is None


def test_a_run_ends_with_the_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_here(make_workspace(tmp_path))
    lines = capsys.readouterr().err.splitlines()
    (found,) = (n for n, line in enumerate(lines) if line.startswith("host RAM "))
    assert "planned" in lines[found]
    assert "not planned without the rates" in lines[found]
    *wrong, waited = lines[found + 1 :]
    assert all(line.startswith("not as planned") for line in wrong)
    assert waited.startswith("waited ")


def test_a_run_says_how_long_it_was_held_up_by_its_rows() -> None:
    assert waited_for_data([0, 0], [1, 2], 0) == "waited 0 s for data, 0.0% of all steps"
    said = "waited 3 s for data, 30.0% of all steps; longest 2.5 s, in step 2"
    assert waited_for_data([0.5, 2.5, 0], [3, 4, 3], 0) == said
    resumed = "waited 3 s for data, 30.0% of all steps; longest 2.5 s, in step 12"
    assert waited_for_data([0.5, 2.5, 0], [3, 4, 3], 10) == resumed
