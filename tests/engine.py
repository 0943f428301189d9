"""Run the engine with lanes of the test's choice on rows of random tokens; see what it computed."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
import yaml
from numpy.typing import NDArray

from megatrain_cli.config.load import load_config
from megatrain_cli.model.attention import PACKED
from megatrain_cli.model.discover import discover
from megatrain_cli.model.functions import eager_functions
from megatrain_cli.model.initial import RandomLayers
from megatrain_cli.model.skeleton import Skeleton
from megatrain_cli.model.template import Head
from megatrain_cli.optim.adamw import AdamStep
from megatrain_cli.optim.worker import TileUpdater
from megatrain_cli.pipeline.compute import MicroBatch
from megatrain_cli.pipeline.cuda_lanes import CudaLanes, Job
from megatrain_cli.pipeline.executor import HostWork
from megatrain_cli.pipeline.lanes import Fence, InlineLanes, Lanes, Mark, Pending, Work
from megatrain_cli.pipeline.ops import Lane, Op
from megatrain_cli.pipeline.trace import Span
from megatrain_cli.plan.plan import RunPlan, make_plan
from megatrain_cli.plan.tiles import TileFormat
from megatrain_cli.store.load import fill_random
from megatrain_cli.store.master import MasterStore
from megatrain_cli.train.assemble import build_executor, prepare
from megatrain_cli.train.step import StepUpdate


def inline(device: torch.device) -> InlineLanes:
    """Lanes of the CPU, to be made where `CudaLanes` could be."""
    del device
    return InlineLanes()


# A config section, or a model's config.
Settings = Mapping[str, object]

# Begins some work and says how to hear of its end, as `Executor.submit` of a pool does.
Later = Callable[[Callable[[], None]], Pending]


class BlockingLanes:
    """Every op runs to its end before the next begins: the GPU's own oracle."""

    def __init__(self, device: torch.device) -> None:
        self._inner = CudaLanes(device)

    def submit(self, op: Op, work: Work, num_bytes: int = 0) -> None:
        self._inner.submit(op, work, num_bytes)
        self._inner.drain()

    def mark(self) -> Mark:
        return self._inner.mark()

    def fence(self) -> Fence:
        return self._inner.fence()

    def take_spans(self) -> list[Span]:
        return self._inner.take_spans()

    def drain(self) -> None:
        self._inner.drain()

    @property
    def num_ended(self) -> int:
        return self._inner.num_ended

    def halt(self) -> None:
        self._inner.halt()

    def close(self) -> None:
        self._inner.close()


class SlowLanes(CudaLanes):
    """The work of some lanes is held up by a kernel that only spins."""

    def __init__(self, device: torch.device, slow: Sequence[Lane], cycles: int = 2_000_000) -> None:
        super().__init__(device)
        self._slow, self._cycles = tuple(slow), cycles

    def submit(self, op: Op, work: Work, num_bytes: int = 0) -> None:
        def slowly() -> Pending | None:
            torch.cuda._sleep(self._cycles)
            return work()

        super().submit(op, slowly if op.lane in self._slow else work, num_bytes)


class CarelessLanes(SlowLanes):
    """Ops of one lane are issued in a right order, and the device is not told to keep it."""

    def __init__(self, device: torch.device, slow: Sequence[Lane], careless: Lane) -> None:
        super().__init__(device, slow, cycles=20_000_000)
        self._careless = careless

    def _hold(self, job: Job) -> None:
        if job.op.lane is not self._careless:
            super()._hold(job)
            return
        for _, record in job.held:
            record.reached.wait()
        self.raise_failure()


class LaterUpdates:
    """Host work whose updates go on after the call, wherever `later` runs them."""

    def __init__(self, inner: HostWork, later: Later) -> None:
        self._inner, self._later = inner, later

    def clip(self, loss: float, squared_norms: Sequence[float]) -> None:
        self._inner.clip(loss, squared_norms)

    def wants_gradients(self) -> bool:
        return self._inner.wants_gradients()

    def update(
        self, layer: int, gradient: torch.Tensor, start: int, squared_norm: float
    ) -> Pending:
        def work() -> None:
            pending = self._inner.update(layer, gradient, start, squared_norm)
            if pending is not None:
                pending.result()

        return self._later(work)


@dataclass(frozen=True)
class Outcome:
    """What a few steps computed, bit for bit; and when each step's ops ran."""

    losses: list[float]
    norms: list[float]
    gradients: list[torch.Tensor]
    weights: list[torch.Tensor]
    moments: list[torch.Tensor]
    spans: list[list[Span]]
    scores: list[float] = field(default_factory=list)

    def same_bits(self, other: "Outcome") -> bool:
        pairs = zip(
            [*self.gradients, *self.weights, *self.moments],
            [*other.gradients, *other.weights, *other.moments],
            strict=True,
        )
        return self.losses == other.losses and all(torch.equal(a, b) for a, b in pairs)


def write_config(folder: Path, shape: Settings, sections: Mapping[str, Settings]) -> Path:
    """A model config without weights, and a run's config beside it."""
    import transformers

    transformers.Qwen2Config.from_dict(dict(shape)).save_pretrained(folder / "model")
    (folder / "rows.jsonl").write_text("{}\n")
    config: dict[str, dict[str, object]] = {
        "model": {"path": "model", "init": "random"},
        "data": {"train": "rows.jsonl", "max_length": 64},
        "train": {"output_dir": "run", "max_steps": 3, "micro_batch_size": 2},
    }
    for name, section in sections.items():
        config[name] = {**config.get(name, {}), **section}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@cache
def _prepared(config: Path, *, packed: bool) -> tuple[Skeleton, RunPlan]:
    loaded = load_config(config)
    skeleton, plan = prepare(loaded)
    # Micro-batches as asked, whatever would fit.
    known = replace(plan.known, joined=1)
    plan = make_plan(loaded.config, skeleton.spec, skeleton.layouts, plan.machine, known)
    if not packed:
        return skeleton, plan
    skeleton = discover(Path(loaded.config.model.path), dtype=skeleton.dtype, attention=PACKED)
    return skeleton, replace(plan, decisions=replace(plan.decisions, attention=PACKED))


@cache
def _updater(threads: int, fmt: TileFormat) -> TileUpdater:
    return TileUpdater(threads, fmt=fmt)


def run(
    config: Path,
    make_lanes: Callable[[torch.device], Lanes],
    *,
    steps: int = 3,
    length: int = 64,
    poison: bool = False,
    around: AbstractContextManager[None] = nullcontext(),  # noqa: B008  has no state
    decided: Mapping[str, object] | None = None,
    ops: Callable[[tuple[Op, ...]], tuple[Op, ...]] | None = None,
    documents: Sequence[NDArray[np.int32]] | None = None,
    later: Later | None = None,
    passes: int = 0,
    scoring: Callable[[tuple[Op, ...]], tuple[Op, ...]] = lambda ops: ops,
) -> Outcome:
    """Train a few steps.

    Args:
        config: As `write_config` makes it.
        make_lanes: Called with the device.
        steps: How many.
        length: Tokens of a row.
        poison: Fill slots with NaN when they are given back.
        around: Entered while the last step is issued and its spans are read.
        decided: Decisions of the plan to replace.
        ops: Changes the proved schedule, to show what happens without a guard.
        documents: Rows are packed: of each step, the documents of every micro-batch.
        later: Where updates go on after the call; None if the call does them.
        passes: After each step, how many times as many rows are evaluated.
        scoring: Changes the proved ops of an evaluation.
    """
    skeleton, plan = _prepared(config, packed=documents is not None)
    assert not plan.shortfalls
    d = replace(plan.decisions, **(decided or {}))  # type: ignore[arg-type]  # the test knows them
    plan = replace(plan, decisions=d)
    store = MasterStore(skeleton.layouts, d.tile_format)
    if d.pin_store:
        store.register()
    fill_random(store, RandomLayers(skeleton, 1).read, 4)
    lanes = make_lanes(torch.device(plan.machine.device))
    functions = eager_functions(Head(skeleton))
    executor = build_executor(
        skeleton, plan, store, lanes, functions, poison=poison, evaluates=passes > 0
    )
    executor._evaluation = scoring(executor._evaluation)
    if ops is not None:
        executor._ops = ops(executor._ops)
    updater = _updater(d.threads, d.tile_format)
    rng = np.random.default_rng(0)
    losses, norms, spans, scores = [], [], [], []
    others = np.random.default_rng(1)
    for step in range(1, steps + 1):
        shape = (d.micro_batch_size, length)
        batch = []
        for _ in range(d.num_micro_batches):
            ids = rng.integers(0, skeleton.spec.vocab_size, shape)
            packed = None if documents is None else documents[step - 1]
            batch.append(MicroBatch(ids, ids.copy(), packed))
        update = StepUpdate(
            step=step,
            base=AdamStep(step, 1e-3, 0.9, 0.95, 1e-8, 0.1),
            max_grad_norm=None if d.eager else 1.0,
            eager=d.eager,
            spec=skeleton.spec,
            store=store,
            updater=updater,
        )
        host = update if later is None else LaterUpdates(update, later)
        with around if step == steps else nullcontext():
            issued = executor.run_step(batch, host)
            issued.clipped.wait()
            spans.append(executor.take_spans())
        losses.append(update.loss)
        norms.append(update.grad_norm)
        told = []
        for _ in range(passes):
            rows = [
                others.integers(0, skeleton.spec.vocab_size, shape)
                for _ in range(d.num_micro_batches)
            ]
            told.append(executor.evaluate([MicroBatch(ids, ids.copy()) for ids in rows]))
        for score in told:
            score.told.wait()
            scores.append(score.loss_sum)
    lanes.drain()
    outcome = Outcome(
        losses,
        norms,
        [t.gradient.clone() for t in store.tiles if t.gradient is not None],
        [t.weights.clone() for t in store.tiles]
        + [t.remainder.clone() for t in store.tiles if t.remainder is not None],
        [x.clone() for t in store.tiles for x in (t.exp_avg, t.exp_avg_sq)],
        spans,
        scores,
    )
    lanes.close()
    executor.close()
    store.close()
    return outcome
