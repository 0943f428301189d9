"""A config becomes live objects, in order; the only place that constructs them."""

from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatrain_cli.config.load import LoadedConfig
from megatrain_cli.config.schema import TrainConfig
from megatrain_cli.errors import DeviceError, PlanError
from megatrain_cli.model.discover import discover
from megatrain_cli.model.functions import Functions
from megatrain_cli.model.initial import RandomLayers
from megatrain_cli.model.known import known_skeleton
from megatrain_cli.model.skeleton import Skeleton
from megatrain_cli.model.template import Head, LayerTemplate, Prologue
from megatrain_cli.optim.crew import cores_beside_gpu
from megatrain_cli.optim.worker import TileUpdater
from megatrain_cli.pipeline.buffers import Buffers
from megatrain_cli.pipeline.compute import Compute
from megatrain_cli.pipeline.copying import CopyPool
from megatrain_cli.pipeline.cuda_lanes import CudaLanes
from megatrain_cli.pipeline.evaluation import build_with_evaluation
from megatrain_cli.pipeline.executor import Executor
from megatrain_cli.pipeline.gateway import Gateway, chunk_bytes_for
from megatrain_cli.pipeline.lanes import InlineLanes, Lanes
from megatrain_cli.pipeline.moves import Moves
from megatrain_cli.pipeline.ops import Kind, Op
from megatrain_cli.pipeline.schedule import build_schedule
from megatrain_cli.pipeline.shape import PipelineShape
from megatrain_cli.pipeline.slabs import SlabPool
from megatrain_cli.pipeline.verify import check_evaluation, check_schedule
from megatrain_cli.plan.decide import Decisions, attention_of, can_be_compiled, copy_threads
from megatrain_cli.plan.machine import MachineSpec
from megatrain_cli.plan.plan import RunPlan, make_plan
from megatrain_cli.probe.machine import probe_machine, with_rates
from megatrain_cli.report.console import RunConsole
from megatrain_cli.store.heap import lean_heap
from megatrain_cli.store.load import fill_random, fill_store
from megatrain_cli.store.master import MasterStore
from megatrain_cli.train.model_folder import weights_of

ORDINARY_MEMORY = "Going on with ordinary memory and pinned staging: slower copies."

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass
class Engine:
    """Everything that lives as long as a run computes."""

    plan: RunPlan
    skeleton: Skeleton
    store: MasterStore
    executor: Executor
    lanes: Lanes
    updater: TileUpdater
    functions: Functions

    def close(self) -> None:
        """End threads, then release memory; every part, even if another's end fails."""
        with ExitStack() as stack:
            for part in (self.store, self.executor, self.updater, self.lanes):  # last one first
                stack.callback(part.close)

    def leave_store(self) -> MasterStore:
        """Close everything but the store and give it back as it is, for another `assemble`."""
        with ExitStack() as stack:
            for part in (self.executor, self.updater, self.lanes):
                stack.callback(part.close)
        return self.store


def prepare(
    loaded: LoadedConfig,
    machine: MachineSpec | None = None,
    name: str | None = None,
    *,
    to_train: bool = True,
) -> tuple[Skeleton, RunPlan]:
    """The model without weights, and the plan for it.

    Args:
        loaded: What is asked.
        machine: To plan for; without it the one at hand.
        name: Of a published model, in place of the folder `model.path`.
        to_train: Without it an architecture whose training is not proved is planned too.
    """
    config = loaded.config
    skeleton = _discover(config, to_train) if name is None else _known(config, name)
    machine = machine or with_rates(probe_machine(config.pipeline.device))
    _check_compile(config, skeleton, machine)
    return skeleton, make_plan(config, skeleton.spec, skeleton.layouts, machine)


def schedule_of(plan: RunPlan) -> tuple[Op, ...]:
    """The ops of one step of a planned run."""
    return build_schedule(_shape(plan))


def evaluation_of(plan: RunPlan) -> tuple[Op, ...]:
    """The ops of an evaluation of as many rows as a step has."""
    return build_with_evaluation(_shape(plan))[1]


def update_order(plan: RunPlan) -> tuple[int, ...]:
    """Layers in the order in which a step updates them."""
    return tuple(dict.fromkeys(op.layer for op in schedule_of(plan) if op.kind is Kind.UPDATE))


def first_uses(plan: RunPlan) -> tuple[int, ...]:
    """Layers in the order in which a step needs their weights."""
    return tuple(dict.fromkeys(op.layer for op in schedule_of(plan) if op.kind is Kind.STREAM_IN))


def assemble(
    loaded: LoadedConfig,
    skeleton: Skeleton,
    plan: RunPlan,
    functions: Functions,
    console: RunConsole,
    store: MasterStore | None = None,
) -> Engine:
    """Build the engine: store, weights, pipeline.

    Args:
        loaded: What was asked.
        skeleton: The model.
        plan: Of a run that fits.
        functions: How layers and head are called.
        console: Hears what the user should know.
        store: Filled or being loaded, and locked as planned, to train on in place of a new one. The
            engine then owns it; where building fails it stays the caller's.

    Raises:
        PlanError: The driver refused to page-lock the store, and without that it does not fit.
        ModelError: The folder's weights and the model's parameters do not match.
    """
    config = loaded.config
    with ExitStack() as stack:  # what stands is taken down again if the next part fails
        if store is None:
            store = MasterStore(skeleton.layouts, plan.decisions.tile_format)
            stack.callback(store.close)
            if plan.decisions.pin_store:
                plan = _pin(config, skeleton, plan, store, console)
            with nullcontext() if plan.machine.has_cuda else lean_heap():
                _fill(config, skeleton, store, plan.decisions.threads)
        device = torch.device(plan.machine.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        lanes: Lanes = CudaLanes(device) if device.type == "cuda" else InlineLanes()
        stack.callback(lanes.close)
        evaluates = config.data.is_evaluated
        executor = build_executor(skeleton, plan, store, lanes, functions, evaluates=evaluates)
        stack.callback(executor.close)
        d = plan.decisions
        cores = cores_beside_gpu(d.threads) if device.type == "cuda" else None
        updater = TileUpdater(d.threads, fmt=d.tile_format, cores=cores)
        stack.pop_all()
    return Engine(plan, skeleton, store, executor, lanes, updater, functions)


def build_executor(
    skeleton: Skeleton,
    plan: RunPlan,
    store: MasterStore,
    lanes: Lanes,
    functions: Functions,
    *,
    poison: bool = False,
    evaluates: bool = False,
) -> Executor:
    """The pipeline over a filled store, its schedule proved.

    Args:
        skeleton: The model.
        plan: Of a run that fits.
        store: Filled, or being loaded.
        lanes: What runs the ops.
        functions: How layers and head are called.
        poison: See `Executor`.
        evaluates: Whether `Executor.evaluate` will be called.
    """
    d = plan.decisions
    spec = skeleton.spec
    device = torch.device(plan.machine.device)
    dtype = DTYPES[d.dtype]
    shape = _shape(plan)
    evaluation: tuple[Op, ...] = ()
    if evaluates:
        ops, evaluation = build_with_evaluation(shape)
        check_evaluation(ops, evaluation, shape)
    else:
        ops = build_schedule(shape)
    check_schedule(ops, shape)
    skeleton.move_buffers(device)
    on_gpu = device.type == "cuda"
    largest = max(layout.numel for layout in skeleton.layouts)
    max_elements = d.micro_batch_size * d.max_length * spec.hidden_size
    with ExitStack() as stack:  # what is page-locked is unlocked if a later part finds no room
        buffers = Buffers(ops, shape, skeleton.layouts, max_elements, dtype, device)
        stack.callback(buffers.close)
        pool = CopyPool(copy_threads(plan.machine))
        stack.callback(pool.close)
        gateway, slabs = None, None
        if on_gpu and not d.pin_store:
            chunk_bytes = chunk_bytes_for(plan.machine.rates, d.target_utilization)
            packers = CopyPool(copy_threads(plan.machine))
            stack.callback(packers.close)
            gateway = Gateway(largest * dtype.itemsize, packers, chunk_bytes=chunk_bytes)
            stack.callback(gateway.close)
        if d.num_slabs:
            slabs = SlabPool(d.num_slabs, d.slab_numel, dtype, pin=on_gpu)
            stack.callback(slabs.close)
        moves = Moves(shape, buffers, store, gateway, slabs, pool)
        layers = [LayerTemplate(skeleton, i) for i in range(len(spec.decoder_layers))]
        compute = Compute(
            shape,
            buffers,
            Prologue(skeleton),
            layers,
            Head(skeleton),
            functions,
            d.head_chunk,
            d.whole_chunk,
            spec.tied,
            device,
        )
        executor = Executor(
            ops,
            lanes,
            buffers,
            compute,
            moves,
            spec.hidden_size,
            poison=poison,
            evaluation=evaluation,
        )
        if on_gpu:
            # Buffers were zeroed on this stream; the lanes' streams start after it.
            torch.cuda.current_stream().synchronize()
        stack.pop_all()
    return executor


def _discover(config: TrainConfig, to_train: bool) -> Skeleton:
    dtype, attention = DTYPES[config.model.dtype], attention_of(config)
    return discover(Path(config.model.path), dtype=dtype, attention=attention, to_train=to_train)


def _known(config: TrainConfig, name: str) -> Skeleton:
    dtype = DTYPES[config.model.dtype]
    return known_skeleton(name, dtype=dtype, attention=attention_of(config))


def _check_compile(config: TrainConfig, skeleton: Skeleton, machine: MachineSpec) -> None:
    """Refuse to compile where it cannot be done."""
    if config.pipeline.compile is True and not can_be_compiled(skeleton.spec, machine):
        reason = "the model has dropout" if machine.has_cuda else "there is no CUDA device"
        raise PlanError(
            f"`pipeline.compile` is true and {reason}: layers cannot be compiled then. Set "
            "`pipeline.compile: auto`."
        )


def _pin(
    config: TrainConfig,
    skeleton: Skeleton,
    plan: RunPlan,
    store: MasterStore,
    console: RunConsole,
) -> RunPlan:
    """Page-lock the store; where the driver refuses and may choose, plan for ordinary memory."""
    try:
        store.register()
    except DeviceError as error:
        if config.store.memory == "pinned":
            raise
        known = replace(plan.known, can_pin=False)
        plan = make_plan(config, skeleton.spec, skeleton.layouts, plan.machine, known)
        if plan.shortfalls:
            shortfalls = "\n".join(plan.shortfalls)
            raise PlanError(
                f"{error} Ordinary memory needs pinned staging besides, and:\n{shortfalls}"
            ) from error
        console.note(f"{error} {ORDINARY_MEMORY}")
    return plan


def _fill(config: TrainConfig, skeleton: Skeleton, store: MasterStore, threads: int) -> None:
    if config.model.init == "random":
        fill_random(store, RandomLayers(skeleton, config.train.seed).read, threads)
        return
    fill_store(store, weights_of(config, skeleton))


def _shape(plan: RunPlan) -> PipelineShape:
    d: Decisions = plan.decisions
    num_layers = len(plan.layer_numels)
    pieces = tuple(-(-n // d.slab_numel) if d.num_slabs else 1 for n in plan.layer_numels)
    return PipelineShape(
        num_layers=num_layers,
        num_micro_batches=d.num_micro_batches,
        num_slots=d.num_slots,
        num_slabs=d.num_slabs,
        pieces=pieces,
        kept=frozenset(range(num_layers - 1 - d.keep_layers, num_layers - 1)),
        offload=d.offload,
        eager=d.eager,
        tied=plan.tied,
        lookup=plan.lookup,
    )
