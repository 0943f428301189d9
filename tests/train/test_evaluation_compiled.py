"""An evaluation computes with what a step has compiled: nothing is compiled for it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatrain_cli.errors import InternalError
from megatrain_cli.model.functions import compiled_functions
from megatrain_cli.model.template import Head
from megatrain_cli.pipeline.compute import MicroBatch
from megatrain_cli.plan.plan import RunPlan
from megatrain_cli.train.assemble import build_executor
from megatrain_cli.train.loop import Run
from tests.train.workspace import Started, make_workspace, start


def as_on_a_gpu(plan: RunPlan) -> RunPlan:
    """Rows of one length, and chunks of the compiled head."""
    return replace(plan, decisions=replace(plan.decisions, compiled=True, whole_chunk=64))


def loss_of(run: Started) -> float:
    assert run.rows.evaluation is not None
    record = Run(run.loaded, run.engine, run.rows).evaluate(run.rows.evaluation, 1)
    assert record is not None
    return record.eval_loss


@pytest.mark.slow
def test_nothing_is_compiled_for_it(tmp_path: Path) -> None:
    torch.compiler.reset()
    config = make_workspace(
        tmp_path,
        model={"layers": 2, "max_position_embeddings": 128},
        data={"eval_share": 0.3, "max_length": 128},
        train={"max_steps": 2, "micro_batch_size": 2},
        pipeline={"activations": "recompute"},  # so that a step has a forward without a graph too
    )
    with start(config, adjust=as_on_a_gpu) as run:
        engine = run.engine
        functions = compiled_functions(Head(engine.skeleton), backend="eager")
        engine.executor.close()
        engine.executor = build_executor(
            engine.skeleton, engine.plan, engine.store, engine.lanes, functions, evaluates=True
        )
        steps = run.steps()
        next(steps)  # compiles, as a rehearsal does
        engine.functions = functions  # from now on compiling is an error
        before = loss_of(run)
        next(steps)
        assert loss_of(run) != before
        assert run.rows.evaluation is not None
        rows = run.rows.evaluation.of_step(0).micro_batches
        shorter = [MicroBatch(m.input_ids[:, :-1], m.labels[:, :-1]) for m in rows]
        with functions.no_recompile(), pytest.raises(InternalError, match="recompile"):
            engine.executor.evaluate(shorter)
