"""Whatever fails, wherever: one error that names the place, and nothing left running behind it."""

import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

import megatrain_cli.train.assemble as assemble_module
from megatrain_cli.errors import DeviceError, InternalError, ModelError
from megatrain_cli.pipeline.compute import StepInputs
from megatrain_cli.pipeline.executor import Executor, HostWork
from megatrain_cli.pipeline.lanes import InlineLanes, Pending
from megatrain_cli.pipeline.ops import Kind, Op
from megatrain_cli.store.master import MasterStore
from tests.train.workspace import make_workspace, start

OFFLOAD = {"activations": {"keep_layers": 0, "offload": True}}

PLACES = {
    Kind.STREAM_IN: "stream_in of layer-00001",
    Kind.FORWARD: "forward of layer-00001, micro-batch 0",
    Kind.LOSS: "loss of head, micro-batch 0",
    Kind.RECOMPUTE: "recompute of layer-00001, micro-batch 0",
    Kind.BACKWARD: "backward of layer-00001, micro-batch 0",
    Kind.STREAM_OUT: "stream_out of layer-00001",
    Kind.ACCUMULATE: "accumulate of layer-00001",
    Kind.OFFLOAD: "offload of layer-00001, micro-batch 0",
    Kind.FETCH: "fetch of layer-00000, micro-batch 0",
    Kind.REPORT: "report of the whole step",
    Kind.CLIP: "clip of the whole step",
    Kind.UPDATE: "update of layer-00001",
}


@pytest.mark.parametrize("kind", sorted(set(Kind) - {Kind.SCORE, Kind.TELL}))  # of evaluations
def test_a_failure_in_any_kind_of_op_names_the_op_and_its_layer(kind: Kind, tmp_path: Path) -> None:
    config = make_workspace(tmp_path, pipeline=OFFLOAD)
    before = threading.active_count()
    with pytest.raises(InternalError, match=f"^{PLACES[kind]} failed: no luck$"):
        run_with(config, kind, RuntimeError("no luck"))
    assert threading.active_count() == before


def test_an_update_that_fails_after_the_call_names_its_layer_too(tmp_path: Path) -> None:
    failed: Future[None] = Future()
    failed.set_exception(RuntimeError("no luck"))
    with start(make_workspace(tmp_path)) as run:
        executor = run.engine.executor
        executor._works[Kind.UPDATE] = lambda op, step, host: (
            failed if executor._named(op) == PLACES[Kind.UPDATE] else None
        )
        with pytest.raises(InternalError, match=r"^update of layer-00001 failed: no luck$"):
            list(run.steps())


def test_running_out_of_device_memory_stays_what_it_is(tmp_path: Path) -> None:
    """`train` turns it into advice."""
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        run_with(make_workspace(tmp_path), Kind.LOSS, torch.OutOfMemoryError("no room"))


def test_a_failing_device_is_told_from_a_bug_and_named_too(tmp_path: Path) -> None:
    error = torch.AcceleratorError("CUDA error: unspecified launch failure\nmore")
    with pytest.raises(DeviceError, match=r"loss of head, micro-batch 0 \(CUDA error.*failure\)"):
        run_with(make_workspace(tmp_path), Kind.LOSS, error)


def run_with(config: Path, kind: Kind, error: Exception) -> None:
    """Run until the op of that kind at its place in `PLACES`, which fails."""
    with start(config) as run:
        executor = run.engine.executor
        work = executor._works[kind]

        def fail(op: Op, step: StepInputs, host: HostWork) -> Pending | None:
            if executor._named(op) == PLACES[kind]:
                raise error
            return work(op, step, host)

        executor._works[kind] = fail
        list(run.steps())


@pytest.mark.parametrize("part", ["_fill", "build_executor", "TileUpdater"])
def test_what_stands_is_taken_down_when_the_next_part_fails(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    for holder in (MasterStore, InlineLanes, Executor):
        monkeypatch.setattr(holder, "close", lambda self: closed.append(type(self).__name__))

    def fail(*_: object, **__: object) -> None:
        raise ModelError("no luck")

    monkeypatch.setattr(assemble_module, part, fail)
    with pytest.raises(ModelError, match="no luck"), start(make_workspace(tmp_path)):
        pass
    standing = ["MasterStore", "InlineLanes", "Executor"]
    count = ["_fill", "build_executor", "TileUpdater"].index(part) + 1
    assert closed == standing[:count][::-1]


def test_a_part_that_does_not_end_well_keeps_no_other_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: InlineLanes) -> None:
        raise RuntimeError("no luck")

    monkeypatch.setattr(InlineLanes, "close", fail)
    before = threading.active_count()
    with pytest.raises(RuntimeError, match="no luck"), start(make_workspace(tmp_path)) as run:
        list(run.steps())
    assert threading.active_count() == before
    assert run.engine.store.tiles == ()
