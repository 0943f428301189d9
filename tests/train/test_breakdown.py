"""The breakdown that a run writes, where its numbers can be known: on the CPU nothing overlaps."""

import math
from pathlib import Path

import pytest

from megatrain_cli.pipeline.ops import Kind
from tests.train.workspace import make_workspace, start


@pytest.mark.parametrize("update", ["deferred", "eager"])
def test_on_the_cpu_nothing_overlaps(update: str, tmp_path: Path) -> None:
    optimizer = {"update": update, "max_grad_norm": None if update == "eager" else 1.0}
    with start(make_workspace(tmp_path, optimizer=optimizer)) as run:
        records = list(run.steps())
    assert len(records) == 3
    for record in records:
        found = record.breakdown
        assert found["step_seconds"] == record.seconds
        assert found["update_hidden_seconds"] == found["transfer_hidden_share"] == 0
        assert found["update_exposed_seconds"] == found["update_seconds"] > 0
        assert found["slab_wait_seconds"] == found["issue_seconds"] == 0
        parts = ("compute", "stream_in", "stream_out", "update")
        assert all(found[f"{part}_seconds"] > 0 for part in parts)
        assert math.fsum(found[f"{part}_seconds"] for part in parts) <= record.seconds
        assert found["switch_median_us"] > 0


def test_bytes_are_those_of_the_tiles_and_of_the_rows(tmp_path: Path) -> None:
    offload = {"activations": {"keep_layers": 0, "offload": True}, "staging_buffers": 1}
    with start(make_workspace(tmp_path, pipeline=offload, tied=True)) as run:
        ops = run.engine.executor._ops
        width = run.engine.skeleton.spec.hidden_size
        sizes = [4 * layout.numel for layout in run.engine.skeleton.layouts]
        for index, record in enumerate(run.steps()):
            rows = run.rows.of_step(index).micro_batches
            inputs = [4 * width * row.input_ids.size for row in rows]

            def moved(kind: Kind, inputs: list[int] = inputs) -> int:
                return sum(inputs[op.micro_batch or 0] for op in ops if op.kind is kind)

            # One slot: each decoder layer comes twice but for the last; embedding and head once.
            weights = sum(sizes) + sum(sizes[1:-2])
            assert record.breakdown["stream_in_bytes"] == weights + moved(Kind.FETCH)
            assert record.breakdown["stream_out_bytes"] == sum(sizes) + moved(Kind.OFFLOAD)
            assert moved(Kind.FETCH) > 0
