"""A plan has the rows of a run where they are soon known, and is a bound where they are not."""

import gc
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatrain_cli.config.load import LoadedConfig, load_config
from megatrain_cli.pipeline.graph_size import measure_graphs
from megatrain_cli.plan.cost import step_bounds
from megatrain_cli.plan.decide import Known
from megatrain_cli.plan.kernels import most_lengths
from megatrain_cli.plan.memory import MAPPED
from megatrain_cli.plan.plan import RunPlan, make_plan
from megatrain_cli.plan.rates import LONG_ROW, SHORT_ROW, CpuLayer, CpuRates, CpuSums
from megatrain_cli.plan.row_facts import RowFacts
from megatrain_cli.train import look_ahead as module
from megatrain_cli.train.assemble import prepare
from megatrain_cli.train.compare import BYTES_OVER, BYTES_UNDER
from megatrain_cli.train.forecast import forecast
from megatrain_cli.train.rows import load_rows
from tests.plan.small import CPU, GPU, RATES, layouts_of, make_config, make_spec, plan_for
from tests.train.test_forecast import SAVES, planned, skeleton_of
from tests.train.workspace import make_workspace

OVERRIDES = ["data.max_length=4096"]


def looked_at(config: Path, overrides: list[str]) -> tuple[LoadedConfig, RunPlan, RunPlan]:
    """The plans before and after the look."""
    loaded = load_config(config, overrides)
    skeleton, before = prepare(loaded)
    return loaded, before, module.look_ahead(loaded, skeleton, before)


def bytes_of(plan: RunPlan, owner: str) -> int:
    return sum(line.num_bytes for line in plan.lines if line.owner == owner)


def test_no_layer_is_tried_of_a_model_that_fits_with_no_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_config(make_workspace(tmp_path), [])
    skeleton, before = prepare(loaded, replace(CPU, host_bytes=1 << 20))
    monkeypatch.delattr(module, "measure_graphs")
    after = module.look_ahead(loaded, skeleton, before)
    assert after.shortfalls
    assert "all 12 rows read" in dict(after.summary)["rows"]


def test_small_files_are_read_and_the_step_with_most_tokens_is_billed(tmp_path: Path) -> None:
    config = make_workspace(
        tmp_path, data={"eval_share": 0.3}, model={"max_position_embeddings": 4096}
    )
    loaded, before, after = looked_at(config, OVERRIDES)
    rows = load_rows(loaded.config, after.decisions)
    assert after.decisions.max_length == 64 < before.decisions.max_length
    found = after.known.rows
    assert found is not None
    tokens = [int(rows.row_lengths[rows.ids_of_step(i)].sum()) for i in range(rows.total_steps)]
    assert found.step_tokens == max(tokens)
    assert rows.evaluation is not None
    assert found.eval_rows == len(rows.evaluation.lengths)
    assert f"graph of {found.step_tokens} tokens, measured" in str(after.lines)
    said = dict(after.summary)["rows"]
    assert said == f"longest {rows.row_lengths.max()} tokens, all {rows.rows_per_epoch} rows read"
    # More rows than are looked at one by one: no step has more than the longest rows together.
    bounded = replace(rows, total_steps=10**6)
    most = sorted(rows.row_lengths)[-rows.rows_per_step :]
    assert bounded.facts.step_tokens == sum(most)


@pytest.mark.parametrize("why", ["large", "absent", "bad"])
def test_rows_that_are_not_read_may_all_be_as_long_as_allowed(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_workspace(tmp_path)
    if why == "large":
        monkeypatch.setattr(module, "READ_BYTES", 10)
    elif why == "absent":
        (tmp_path / "train.jsonl").unlink()
    else:
        (tmp_path / "train.jsonl").write_text("{")
    _, before, after = looked_at(config, OVERRIDES)
    assert after.decisions.max_length == before.decisions.max_length
    assert after.known.rows is None
    assert dict(after.summary)["rows"].endswith(
        f": each may have {after.decisions.max_length} tokens"
    )


def test_rows_that_were_prepared_before_are_taken_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "READ_BYTES", 10)
    config = make_workspace(tmp_path, data={"cache_dir": "kept"})
    loaded, before, after = looked_at(config, [])
    assert after.known.rows is None
    assert not (tmp_path / "kept").exists()  # a plan leaves nothing
    load_rows(loaded.config, before.decisions)
    assert dict(looked_at(config, [])[2].summary)["rows"].endswith(" rows prepared before")


def test_mapped_rows_are_in_the_peak_and_in_no_need() -> None:
    spec = make_spec()
    plan = plan_for(spec)
    rows = RowFacts(64, 32.0, 1 << 30, 0, 1)
    config = make_config()
    known = replace(plan.known, rows=rows)

    found = make_plan(config, spec, layouts_of(spec), plan.machine, known)
    assert bytes_of(found, "rows") == 1 << 30
    assert MAPPED in {line.place for line in found.lines}
    assert found.host_bytes - found.places["host RAM"][0] == 1 << 30
    tight = replace(CPU, host_bytes=found.places["host RAM"][0])
    assert not make_plan(config, spec, layouts_of(spec), tight, known).shortfalls


def test_graphs_are_counted_as_autograd_keeps_them_and_leave_nothing(tmp_path: Path) -> None:
    loaded = load_config(make_workspace(tmp_path), ["model.attention=eager"])
    skeleton, plan = prepare(loaded)
    whole = measure_graphs(skeleton, replace(plan.decisions, max_length=96))
    # From three shorter rows, where the middle one is the same: a parabola through them is exact.
    longer = measure_graphs(skeleton, replace(plan.decisions, max_length=97))
    (kind,) = whole.graph_bytes
    growth = longer.graph_bytes[kind] - whole.graph_bytes[kind]
    heads = skeleton.spec.num_heads
    # Scores alone grow by 2 T + 1 numbers a head; they are kept at least once.
    assert growth >= heads * (2 * 96 + 1) * 4
    assert growth < 0.05 * whole.graph_bytes[kind]

    held = [x for x in gc.get_objects() if type(x) is torch.Tensor and x.shape[-1:] == (96,)]
    assert not held


def test_an_evaluation_is_timed_and_counted() -> None:
    plan = planned("3b", 8, 1024, 5e9, {})
    spec = skeleton_of("3b").spec
    known = replace(plan.known, rows=RowFacts(8192, 8192.0, 0, 80, 1000))
    plan = replace(plan, known=known)
    asked = make_config({"eval": {"steps": 300, "at_start": True}}).eval
    found, without = (forecast(plan, spec, 1000, SAVES, e) for e in (asked, None))
    assert found is not None
    assert without is not None
    assert found.eval_seconds is not None
    # Ten passes, forward alone: none is longer than a step.
    assert 0 < found.eval_seconds < 10 * found.step_seconds
    assert found.run_seconds is not None
    assert without.run_seconds is not None
    more = found.run_seconds - without.run_seconds  # after 0, 300, 600, 900 and 1000; or after 1000
    assert more == pytest.approx(4 * found.eval_seconds)
    assert "an evaluation takes about" in "\n".join(found.lines())


def test_an_evaluation_takes_no_memory_of_its_own() -> None:
    for machine in (CPU, GPU):
        plain = plan_for(make_spec(), machine)
        judged = plan_for(make_spec(), machine, {"data": {"eval_share": 0.1}})
        assert judged.lines == plain.lines


CORES = CpuLayer(
    narrow_short=30e9,
    narrow_long=50e9,
    wide_short=60e9,
    wide_long=100e9,
    new_product=0.01,
    logits=1e9,
    sums=CpuSums(first=5e9, more=4e9, finish=3e9),
)
ALL_CORES = CpuRates(CORES, CORES, fresh=3e9)


def test_each_compute_dtype_has_the_rates_that_were_measured_with_it() -> None:
    rates = CpuRates(float32=CORES, bfloat16=replace(CORES, logits=2e9), fresh=3e9)
    assert rates.of("float32").logits == 1e9
    assert rates.of("bfloat16").logits == 2e9


def test_the_cpu_does_one_thing_after_the_other() -> None:
    machine = replace(CPU, rates=replace(RATES, compute=None, link=None, cpu=ALL_CORES))
    spec = make_spec(hidden=512)
    plan = plan_for(spec, machine)
    bounds = plan.bounds
    assert bounds is not None
    assert bounds.compute is not None
    found = forecast(plan, spec, 10)
    assert found is not None
    assert found.step_seconds >= bounds.compute + bounds.adam
    half = RowFacts(64, 32.0, 0, 0, 10)  # rows are half as long as they may be
    less = step_bounds(spec, plan.decisions, machine, half)
    assert less is not None
    assert less.compute is not None
    assert less.compute < 0.55 * bounds.compute


def test_a_row_of_a_new_length_takes_longer_until_kernels_are_there() -> None:
    """And always, where there are more lengths than kernels are kept for."""
    machine = replace(CPU, rates=replace(RATES, compute=None, link=None, cpu=ALL_CORES))
    spec, config = make_spec(hidden=512), make_config({"train": {"micro_batch_size": 1}})

    def seconds(lengths: int, steps: int) -> float:
        known = Known(rows=RowFacts(64, 32.0, 0, 0, steps, lengths))
        plan = make_plan(config, spec, layouts_of(spec), machine, known)
        assert plan.decisions.num_micro_batches == 1
        found = forecast(plan, spec, None)
        assert found is not None
        return found.step_seconds

    plain, each = seconds(0, 10), seconds(10, 10)  # no row's, and every row's
    # Three products: up and down of all layers, and the head's.
    assert each - plain == pytest.approx(3 * CORES.new_product)
    assert seconds(10, 100) - plain == pytest.approx((each - plain) / 10)
    assert seconds(most_lengths(spec) + 1, 10**6) == pytest.approx(each)


@pytest.mark.parametrize(("width", "rates"), [(512, (30e9, 50e9)), (2048, (60e9, 100e9))])
def test_the_cores_cost_what_was_measured(width: int, rates: tuple[float, float]) -> None:
    cost = CORES.cost(width)
    for tokens, rate in zip((SHORT_ROW, LONG_ROW), rates, strict=True):
        assert cost.row + tokens * cost.token == pytest.approx(6 * tokens / rate)


def test_costs_of_the_cores_follow_the_width_and_are_never_nothing() -> None:
    found = [CORES.cost(width) for width in (256, 512, 1024, 2048, 10**6)]
    assert [cost.token for cost in found] == sorted((cost.token for cost in found), reverse=True)
    assert all(cost.token > 0 for cost in found)
    scattered = replace(CORES, narrow_short=90e9)
    assert scattered.cost(512).row == pytest.approx(0)
    assert scattered.cost(512).token == pytest.approx(6 / 50e9)


def test_a_run_takes_the_memory_that_was_planned(tmp_path: Path) -> None:
    # The first plan has room for rows of 512 tokens; they have 64 at most.
    model = {"layers": 4, "hidden": 512, "max_position_embeddings": 512}
    config = make_workspace(tmp_path, model=model, train={"max_steps": 2})
    command = [sys.executable, "-m", "megatrain_cli", "train", str(config), "data.max_length=512"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    # Its own count: what the system tells of a child may be what its parent had held.
    found = re.search(r"host RAM ([\d.]+ .iB) planned, ([\d.]+ .iB) measured", text)
    assert found is not None, text
    planned, measured = map(mib_of, found.groups())
    off = planned / measured - 1
    # Libraries differ from machine to machine and such a run is little else: its margin is wider
    # than that of the runs of scripts/check_plan.py.
    assert -2 * BYTES_UNDER <= off <= 2 * BYTES_OVER, text
    told = re.findall(r"^total +host \w+ +([\d.]+ .iB)", text, re.MULTILINE)
    assert sum(map(mib_of, told)) == pytest.approx(planned, rel=0.01)


def mib_of(text: str) -> float:
    """Of a size as it is shown."""
    size, unit = text.split()
    return float(size) * {"KiB": 1 / 1024, "MiB": 1, "GiB": 1024}[unit]
