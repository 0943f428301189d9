"""Everything that a checkpoint says about its run, from the run's parts."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from pydantic import JsonValue

from megatrain_cli.checkpoint.facts import DataFacts, Facts, ModelFacts, Pending
from megatrain_cli.config.changes import exact
from megatrain_cli.config.schema import TrainConfig
from megatrain_cli.errors import IncompatibleError, ModelError
from megatrain_cli.model.skeleton import Skeleton
from megatrain_cli.plan.decide import Decisions
from megatrain_cli.plan.plan import RunPlan
from megatrain_cli.train.numerics import numerics_of
from megatrain_cli.train.rows import TrainingRows

LOSSES_KEPT = 16
"""Last losses that a checkpoint names, so that a resumed run can be compared with it."""

_DTYPE_NAMES = {"bfloat16": "BF16", "float32": "F32"}

# Of config.json: how the weights are stored, and who wrote it. None of it is the model.
_NO_MODEL = ("dtype", "torch_dtype", "transformers_version", "_name_or_path")


@dataclass(frozen=True)
class RunFacts:
    """What stays the same through an attempt; `at` adds the step.

    Attributes:
        start: The facts where the attempt begins.
        rows: As planned.
    """

    start: Facts
    rows: TrainingRows

    def at(
        self,
        step: int,
        *,
        losses: Sequence[float],
        parent: str | None,
        pending: Pending | None = None,
    ) -> Facts:
        """The facts of a checkpoint after `step` steps.

        Args:
            step: Updates completed: of the layer that has had the most.
            losses: Of the last steps, newest last; more than are kept may be given.
            parent: Id of the checkpoint before this one, in this attempt or resumed from.
            pending: The update that some layers still need.
        """
        # The rows of a pending update have been taken, even if no layer has had it yet.
        position = self.rows.position_after(step if pending is None else pending.step)
        found = {
            "step": step,
            "finished": step >= self.start.target_steps and pending is None,
            "parent": parent,
            "pending": pending,
            "data": self.start.data.model_copy(update={"next_row": position.row}),
            "losses_tail": tuple(float(loss).hex() for loss in losses[-LOSSES_KEPT:]),
        }
        return Facts.model_validate(dict(self.start) | found)


def run_facts(
    config: TrainConfig,
    skeleton: Skeleton,
    plan: RunPlan,
    rows: TrainingRows,
    *,
    data: DataFacts,
    model: ModelFacts,
    run_id: str,
    attempt: int,
    changes: Sequence[dict[str, JsonValue]] = (),
) -> RunFacts:
    """Gather the facts of a run whose kernels and plan are settled.

    Args:
        config: In force.
        skeleton: The model.
        plan: In force.
        rows: As planned.
        data: From `data_facts`.
        model: From `model_facts`.
        run_id: Of the run folder.
        attempt: Of the run folder.
        changes: The whole lineage, oldest first.
    """
    optimizer = config.optimizer.model_dump(mode="json", exclude={"master", "threads"})
    how: dict[str, JsonValue] = {
        "name": "adamw",
        "backend": "megatrain-cpu",
        "bias_correction": "pow-f64",
    }
    schedule = config.schedule.model_dump(mode="json")
    start = Facts(
        run_id=run_id,
        attempt=attempt,
        parent=None,
        step=rows.start.step,
        finished=False,
        target_steps=rows.total_steps,
        pending=None,
        model=model,
        dtypes=dtypes_of(plan.decisions),
        optimizer=how | _exact(optimizer),
        schedule=_exact(schedule) | {"total_steps": rows.total_steps},
        data=data,
        numerics=numerics_of(skeleton, plan),
        plan=_exact(asdict(plan.decisions)),
        losses_tail=(),
        changes=tuple(changes),
    )
    return RunFacts(start, rows)


def model_facts(skeleton: Skeleton, config_json: bytes) -> ModelFacts:
    """Of the model, and of the `config.json` that it was made from.

    Raises:
        ModelError: The file is no JSON object.
    """
    spec = skeleton.spec
    try:
        values = json.loads(config_json)
        kept = {key: value for key, value in values.items() if key not in _NO_MODEL}
    except (ValueError, AttributeError, RecursionError) as error:
        raise ModelError(f"config.json of the model is no JSON object: {error}") from error
    text = json.dumps(kept, sort_keys=True, separators=(",", ":"))
    return ModelFacts(
        architecture=spec.architecture,
        config_sha256=hashlib.sha256(text.encode()).hexdigest(),
        num_layers=len(spec.decoder_layers),
        num_parameters=spec.num_parameters,
        vocab_size=spec.vocab_size,
        tied=tuple(sorted(skeleton.aliases)),
    )


def dtypes_of(decisions: Decisions) -> dict[str, str | None]:
    """How weights, masters and moments are kept; FP32 weights are their own masters."""
    fmt = decisions.tile_format
    return {
        "weights": _DTYPE_NAMES[fmt.compute_dtype],
        "master": None if fmt.compute_dtype == "float32" else fmt.master,
        "exp_avg": "F32",
        "exp_avg_sq": "F32",
    }


def check_model(saved: ModelFacts, now: ModelFacts) -> None:
    """Refuse a model that is not the checkpoint's.

    Raises:
        IncompatibleError: Says each fact that differs.
    """
    _refuse_differences("The model is not that of the checkpoint", dict(saved), dict(now))


def check_dtypes(saved: dict[str, str | None], now: dict[str, str | None]) -> None:
    """Refuse to keep the state in another form than it was saved in.

    Raises:
        IncompatibleError: Says each part that differs.
    """
    _refuse_differences("The checkpoint's state is kept in another form", dict(saved), dict(now))


def _refuse_differences(what: str, saved: dict[str, object], now: dict[str, object]) -> None:
    found = [
        f"{key} {saved[key]!a} -> {value!a}"
        for key, value in now.items()
        if key in saved and saved[key] != value
    ]
    if found:
        raise IncompatibleError(f"{what}: {'; '.join(found)}. It goes on only as it was begun.")


def _exact(values: dict[str, JsonValue]) -> dict[str, JsonValue]:
    return {key: exact(value) for key, value in values.items()}
