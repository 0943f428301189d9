"""Whatever fails, wherever: one error that names the place, and nothing left running behind it."""

import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from megatrain_cli.errors import InternalError
from megatrain_cli.pipeline.ops import Kind
from tests.train.workspace import make_workspace, start

OFFLOAD = {"pipeline": {"activations": {"keep_layers": 0, "offload": True}}}

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
    Kind.CLIP: "clip of the whole step",
    Kind.UPDATE: "update of layer-00001",
}


@pytest.mark.parametrize("kind", list(Kind))
def test_a_failure_in_any_kind_of_op_names_the_op_and_its_layer(kind: Kind, tmp_path: Path) -> None:
    place = PLACES[kind]
    sections: Mapping[str, Mapping[str, object]] = OFFLOAD
    config = make_workspace(tmp_path, **sections)
    before = threading.active_count()
    with (
        pytest.raises(InternalError, match=f"^{place} failed: no luck$"),
        start(config) as run,
    ):
        executor = run.engine.executor
        work = executor._works[kind]

        def fail(op: object, step: object) -> None:
            if executor._named(op).startswith(place):  # type: ignore[arg-type]  # an Op
                raise RuntimeError("no luck")
            work(op, step)  # type: ignore[arg-type]

        executor._works[kind] = fail
        list(run.steps())
    assert threading.active_count() == before


def test_running_out_of_device_memory_stays_what_it_is(tmp_path: Path) -> None:
    """`train` turns it into advice."""

    def fail(op: object, step: object) -> None:
        raise torch.OutOfMemoryError("no room")

    with (
        pytest.raises(torch.OutOfMemoryError, match="no room"),
        start(make_workspace(tmp_path)) as run,
    ):
        run.engine.executor._works[Kind.LOSS] = fail
        list(run.steps())
