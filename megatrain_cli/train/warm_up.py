"""Compile what will be computed, measure what it takes, and plan again with what is known then."""

import gc
from dataclasses import replace
from functools import partial

import torch

from megatrain_cli.config.schema import TrainConfig
from megatrain_cli.errors import DeviceError, PlanError
from megatrain_cli.model.functions import Functions, compiled_functions, eager_functions
from megatrain_cli.model.kernels import (
    dispatched_kernel,
    find_difference,
    run_layers_once,
    settle_repeatable,
)
from megatrain_cli.model.skeleton import Skeleton
from megatrain_cli.model.template import Head
from megatrain_cli.pipeline.graph_size import measure_graphs
from megatrain_cli.pipeline.rehearsal import rehearse
from megatrain_cli.plan.decide import Decisions, Known, ways_to_join
from megatrain_cli.plan.plan import RunPlan, make_plan
from megatrain_cli.plan.row_facts import RowFacts
from megatrain_cli.report.console import RunConsole
from megatrain_cli.store.heap import settle_heap


def warm_up(
    config: TrainConfig,
    skeleton: Skeleton,
    plan: RunPlan,
    length: int,
    console: RunConsole,
    rows: RowFacts | None = None,
) -> tuple[RunPlan, Functions]:
    """The plan in force and the functions of a run.

    Args:
        config: Of the run.
        skeleton: Its buffers are moved to the device.
        plan: Made before the data was known.
        length: Tokens of the longest row.
        console: Told when compiling fails and the run goes on without.
        rows: What else is known of the rows.

    Raises:
        PlanError: It does not fit a GPU, or `pipeline.compile` is true and nothing can be compiled.
        DeviceError: `train.deterministic` is true and something was seen not to repeat.
    """
    machine, head = plan.machine, Head(skeleton)
    device = torch.device(machine.device)

    def plan_again(known: Known) -> RunPlan:
        return make_plan(config, skeleton.spec, skeleton.layouts, machine, known)

    def rehearsed(functions: Functions, plan: RunPlan) -> RunPlan:
        """The plan with what was measured; micro-batches that do not fit together are parted."""
        joined = plan.decisions.joined
        try:
            measured = rehearse(skeleton, functions, plan.decisions, device)
        except torch.OutOfMemoryError:
            if joined == 1:
                raise
            # Tried again below and not here: while the error lives, its traceback holds what the
            # rehearsal had allocated.
            measured = None
        _release_caches()
        if measured is not None:
            found = plan_again(replace(plan.known, measured=measured, joined=joined))
            if joined == 1 or found.device_bytes <= machine.device_bytes:
                return found
        any_way = ways_to_join(config, skeleton.spec, machine, replace(plan.known, joined=None))
        fewer = next(n for n in any_way if n < joined)
        return rehearsed(functions, plan_again(replace(plan.known, joined=fewer)))

    plan = plan_again(replace(plan.known, length=length, rows=rows))
    if not machine.has_cuda:
        settle_heap()
        measured = measure_graphs(skeleton, plan.decisions)
        return plan_again(replace(plan.known, measured=measured)), eager_functions(head)
    if plan.shortfalls:  # a rehearsal would run out of memory
        raise PlanError("\n".join(plan.shortfalls))
    torch.cuda.set_device(device)
    skeleton.move_buffers(device)
    # Before anything is compiled: compiled layers keep to the kernels that were allowed then.
    console.note(f"attention: {_settle_attention(skeleton, plan.decisions, device)}")
    if plan.decisions.compiled:
        functions = compiled_functions(head)
        try:
            found = rehearsed(functions, plan)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a compiler, its C compiler or its cache: any kind of failure
            said = str(error).strip() or type(error).__name__  # a bare assertion says nothing
            reason = f"torch.compile failed: {said.splitlines()[0]}"
            if config.pipeline.compile is True:
                raise PlanError(
                    f"{reason} Set `pipeline.compile: auto` to go on without it."
                ) from error
            console.note(f"{reason} Layers run without it, which is slower; nothing else changes.")
            plan = plan_again(replace(plan.known, can_compile=False))
        else:
            _prove_compiled(skeleton, functions, found.decisions, device)
            return found, functions
    functions = eager_functions(head)
    return rehearsed(functions, plan), functions


def _release_caches() -> None:
    """Give back what rehearsing took of the device and of page-locked memory.

    While it tries kernels that write to their arguments, torch's compiler saves these in
    page-locked memory if the device has no room for copies: one tensor of a layer's widest product,
    rounded up to a power of two, which torch then holds for good (7B with 65,536 tokens: 4 GiB).
    """
    # Compilers leave cycles of objects, and tensors may hang on some of them.
    gc.collect()
    torch.cuda.empty_cache()
    # Torch 2.11 has no public name for it.
    public = getattr(torch.accelerator, "empty_host_cache", None)
    (public or torch._C._host_emptyCache)()


def _settle_attention(skeleton: Skeleton, d: Decisions, device: torch.device) -> str:
    """Which kernel attends; where the run is deterministic, one proved to repeat."""
    shape = d.micro_batch_size, d.max_length
    if d.deterministic:
        kernel = settle_repeatable(d.attention, partial(run_layers_once, skeleton, *shape, device))
        torch.cuda.empty_cache()  # the plan counts on all of it
        return f"{d.attention} by {kernel}, which repeated bit for bit"
    if d.attention != "sdpa":
        return d.attention
    return f"sdpa by {dispatched_kernel(skeleton.hf_config, skeleton.dtype, device, *shape)}"


def _prove_compiled(
    skeleton: Skeleton, functions: Functions, d: Decisions, device: torch.device
) -> None:
    """Where the run is deterministic, that compiled layers repeat too."""
    if not d.deterministic:
        return
    shape = d.micro_batch_size, d.max_length
    problem = find_difference(partial(run_layers_once, skeleton, *shape, device, functions.layer))
    torch.cuda.empty_cache()
    if problem is not None:
        raise DeviceError(
            f"train.deterministic is true and the compiled layers {problem}. Set "
            "`pipeline.compile: false`, or `train.deterministic: false`."
        )
