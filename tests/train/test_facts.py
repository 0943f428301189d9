"""A checkpoint's facts: what they say of a run, and what they make of another model or machine."""

import json
import platform
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.checkpoint.facts import Facts, ModelFacts, Pending
from megatrain_cli.checkpoint.strict_json import canonical
from megatrain_cli.errors import IncompatibleError, ModelError
from megatrain_cli.plan.decide import Before
from megatrain_cli.plan.tiles import TileFormat
from megatrain_cli.train import numerics
from megatrain_cli.train.data_facts import data_facts
from megatrain_cli.train.facts import (
    LOSSES_KEPT,
    RunFacts,
    check_dtypes,
    check_model,
    dtypes_of,
    model_facts,
    run_facts,
)
from megatrain_cli.train.numerics import (
    chosen_before,
    differences,
    not_bit_exact,
    numerics_of,
)
from tests.plan.small import GPU
from tests.train.workspace import Started, make_workspace, start

PARENT = "sha256:" + "1" * 64


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Started]:
    folder = tmp_path_factory.mktemp("run")
    split = {"master": "fp32_split"}
    config = make_workspace(folder, tied=request.param, rows=10, optimizer=split)
    with start(config, ["model.dtype=bfloat16", "train.max_steps=6"]) as started:
        yield started


def facts_of(run: Started) -> RunFacts:
    config, engine = run.loaded.config, run.engine
    raw = (Path(config.model.path) / "config.json").read_bytes()
    return run_facts(
        config,
        engine.skeleton,
        engine.plan,
        run.rows,
        data=data_facts(config, run.rows),
        model=model_facts(engine.skeleton, raw),
        run_id="a" * 32,
        attempt=2,
        changes=({"step": 1, "key": "x"},),
    )


def test_facts_say_where_the_run_is_and_hold_no_float(run: Started) -> None:
    found = facts_of(run).at(4, losses=[0.1 * i for i in range(40)], parent=PARENT)
    assert (found.run_id, found.attempt, found.parent) == ("a" * 32, 2, PARENT)
    assert (found.step, found.target_steps, found.finished) == (4, 6, False)
    assert (found.data.next_row, found.data.rows_per_step) == (16, 4)
    assert [float.fromhex(loss) for loss in found.losses_tail] == [
        0.1 * i for i in range(40 - LOSSES_KEPT, 40)
    ]
    assert found.changes == ({"step": 1, "key": "x"},)
    assert float.fromhex(str(found.optimizer["learning_rate"])) == 1e-3
    assert found.schedule["total_steps"] == 6
    raw = canonical(found.model_dump())  # refuses floats
    assert Facts.model_validate_json(raw) == found


def test_the_last_step_ends_the_run_unless_an_update_is_under_way(run: Started) -> None:
    facts = facts_of(run)
    assert facts.at(6, losses=[], parent=None).finished
    pending = Pending(step=6, learning_rate=(1e-3).hex(), grad_scale=(1.0).hex())
    for step in (5, 6):  # no layer has had it, or some
        found = facts.at(step, losses=[], parent=None, pending=pending)
        assert not found.finished
        assert found.data.next_row == 24


def test_a_model_is_its_config_and_its_shapes(run: Started) -> None:
    skeleton = run.engine.skeleton
    path = Path(run.loaded.config.model.path) / "config.json"
    found = model_facts(skeleton, path.read_bytes())
    assert found.num_layers == 3
    assert found.num_parameters == skeleton.spec.num_parameters
    assert bool(found.tied) is bool(skeleton.spec.tied)
    values = json.loads(path.read_text())
    same = {**dict(reversed(values.items())), "dtype": "x", "transformers_version": "9"}
    assert model_facts(skeleton, json.dumps(same, indent=7).encode()) == found
    check_model(found, found)
    other = model_facts(skeleton, json.dumps({**values, "rope_theta": 5.0}).encode())
    with pytest.raises(IncompatibleError, match=r"not that of the checkpoint: config_sha256"):
        check_model(found, other)
    for broken in (b"[]", b"{"):
        with pytest.raises(ModelError, match="no JSON object"):
            model_facts(skeleton, broken)


def test_another_model_is_refused_with_all_that_differs() -> None:
    """F51, F52: also with as many layers."""
    saved = ModelFacts(
        architecture="A", config_sha256="0" * 64, num_layers=2, num_parameters=9, vocab_size=5,
        tied=(),
    )  # fmt: skip
    now = saved.model_copy(update={"architecture": "B\x1b", "vocab_size": 6})
    with pytest.raises(IncompatibleError) as caught:
        check_model(saved, now)
    assert "architecture 'A' -> 'B\\x1b'; vocab_size 5 -> 6." in str(caught.value)


@pytest.mark.parametrize(
    ("fmt", "weights", "master"),
    [
        (TileFormat("bfloat16", "fp32_split", True), "BF16", "fp32_split"),
        (TileFormat("bfloat16", "bf16_stochastic", True), "BF16", "bf16_stochastic"),
        (TileFormat("bfloat16", "fp32", False), "BF16", "fp32"),
        (TileFormat("float32", "fp32", True), "F32", None),
    ],
)
def test_another_form_of_the_state_is_refused(
    fmt: TileFormat, weights: str, master: str | None, run: Started
) -> None:
    """F72."""
    found = dtypes_of(replace(run.engine.plan.decisions, tile_format=fmt))
    assert (found["weights"], found["master"]) == (weights, master)
    check_dtypes(found, found)
    with pytest.raises(IncompatibleError, match="another form: exp_avg 'F32' -> 'BF16'"):
        check_dtypes(found, found | {"exp_avg": "BF16"})


def test_the_fingerprint_names_what_bits_depend_on(run: Started) -> None:
    found = numerics_of(run.engine.skeleton, run.engine.plan)
    assert found["torch"] == torch.__version__
    assert found["transformers"] == transformers.__version__
    assert found["cpu_simd"] == torch.backends.cpu.get_cpu_capability()
    assert found["cpu_threads"] == 1
    assert found["cpu"] == platform.machine()
    assert (found["gpu"], found["sm"], found["driver"], found["cuda"]) == (None,) * 4
    assert found["dtype"] == "bfloat16"
    assert found == numerics_of(run.engine.skeleton, run.engine.plan)
    kept = replace(run.engine.plan.decisions, keep_layers=1)
    other = numerics_of(run.engine.skeleton, replace(run.engine.plan, decisions=kept))
    assert differences(found, other) == [f"keep_layers {found['keep_layers']} -> 1"]


values = st.one_of(st.none(), st.booleans(), st.integers(0, 3), st.sampled_from(["a", "b"]))
prints = st.dictionaries(st.sampled_from("abcd"), values)


@given(prints, prints)
def test_every_difference_is_told_once_and_equal_prints_promise_bits(
    saved: dict[str, object], now: dict[str, object]
) -> None:
    found = differences(saved, now)  # type: ignore[arg-type] # all JSON
    shared = [key for key in saved if key in now and saved[key] != now[key]]
    assert [line.split()[0] for line in found] == shared
    said = not_bit_exact(found)
    assert (said is None) is not bool(shared)
    if said:
        assert said.startswith("not bit-exact from here on: ")
        assert "\n" not in said


def test_what_was_chosen_is_taken_over_on_the_same_kind_of_device_alone(run: Started) -> None:
    saved = facts_of(run).at(0, losses=(), parent=None)
    machine = run.engine.plan.machine
    d = run.engine.plan.decisions
    assert chosen_before(saved, machine) == Before(d.joined, d.keep_layers, d.offload)
    assert chosen_before(saved, replace(machine, device_name="another")) is None
    older = saved.model_copy(update={"plan": {"keep_layers": 1}})
    assert chosen_before(older, machine) is None


def test_a_fingerprint_from_a_checkpoint_cannot_control_a_terminal() -> None:
    assert differences({"gpu": "\x1b[2J"}, {"gpu": None}) == ["gpu \\x1b[2J -> none"]
    assert differences({"x": True}, {"x": False}) == ["x on -> off"]


def test_on_a_gpu_the_kernel_that_attends_is_part_of_the_fingerprint(
    run: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No GPU is needed: torch's two answers about one are stood in for."""
    asked = []

    def kernel(*shape: object) -> str:
        asked.append(shape[2:])
        return "flash"

    monkeypatch.setattr(numerics, "dispatched_kernel", kernel)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    plan = replace(run.engine.plan, machine=GPU)
    found = numerics_of(run.engine.skeleton, plan)
    assert (found["gpu"], found["sm"]) == ("NVIDIA H200", "9.0")
    assert found["attention"] == "sdpa by flash"
    d = plan.decisions
    assert asked == [(torch.device("cuda:0"), d.micro_batch_size, d.max_length)]
    eager = replace(plan, decisions=replace(d, attention="eager"))
    assert numerics_of(run.engine.skeleton, eager)["attention"] == "eager"
