"""All that is settled before a run's memory is taken: plan, rows, kernels, room on the disk."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from pydantic import JsonValue

from megatrain_cli.checkpoint.facts import DataFacts, ModelFacts
from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.checkpoint.model_files import model_files
from megatrain_cli.checkpoint.names import TEMPLATE_NAME
from megatrain_cli.checkpoint.remove import remove_leftovers
from megatrain_cli.checkpoint.storage import StorageFacts
from megatrain_cli.config.load import LoadedConfig, dump_config
from megatrain_cli.config.schema import TrainConfig
from megatrain_cli.errors import DeviceError, PlanError
from megatrain_cli.limits import note_on_cpu_time
from megatrain_cli.model.functions import Functions
from megatrain_cli.model.skeleton import Skeleton
from megatrain_cli.pipeline.executor import device_failure
from megatrain_cli.plan.plan import RunPlan, make_plan
from megatrain_cli.report.console import RunConsole
from megatrain_cli.train.assemble import DTYPES, prepare
from megatrain_cli.train.data_facts import check_data, data_facts
from megatrain_cli.train.evaluating import note_on_other_evaluation
from megatrain_cli.train.facts import check_dtypes, check_model, dtypes_of, model_facts
from megatrain_cli.train.folder import RunFolder
from megatrain_cli.train.joining import warned
from megatrain_cli.train.look_ahead import is_hopeless
from megatrain_cli.train.model_folder import check_examples, weights_of
from megatrain_cli.train.numerics import (
    chosen_before,
    differences,
    not_bit_exact,
    numerics_of,
)
from megatrain_cli.train.other_rows import notes_on_other_rows
from megatrain_cli.train.position import START, Position
from megatrain_cli.train.resume import SAVED_CONFIG, Resumption
from megatrain_cli.train.room import look_at_disk
from megatrain_cli.train.rows import TrainingRows, load_rows
from megatrain_cli.train.warm_up import warm_up
from megatrain_cli.units import show_number

SAVED_PLAN = "training/plan.json"
"""The plan in force, as a file of each checkpoint."""

# Share of padding beyond which a compiled run says so: each token then costs more than twice.
NOTED_PADDING = 0.5


@dataclass(frozen=True)
class Prepared:
    """What an attempt is made of.

    Attributes:
        aux: Files that go into each checkpoint beside its shards, by name.
        lineage: Config changes of all attempts, this one's included.
    """

    skeleton: Skeleton
    plan: RunPlan
    functions: Functions
    rows: TrainingRows
    data: DataFacts
    model: ModelFacts
    storage: StorageFacts
    aux: Mapping[str, bytes]
    lineage: tuple[dict[str, JsonValue], ...]


def prepare_attempt(
    loaded: LoadedConfig,
    recorded: TrainConfig,
    folder: RunFolder,
    resumption: Resumption | None,
    console: RunConsole,
) -> Prepared:
    """Read the data, settle the kernels, plan, and look at the disk.

    Args:
        loaded: The config in force.
        recorded: The config to be written down.
        folder: Of the run; its lock is held.
        resumption: Where the run goes on; None for a new one.
        console: Hears what a person should know.

    Raises:
        PlanError: It does not fit.
        StorageError: The disk cannot take a checkpoint.
        IncompatibleError: Model or data are not those of the checkpoint.
    """
    config, fs = loaded.config, FileSystem()
    skeleton, plan = prepare(loaded)
    if resumption is not None:
        before = chosen_before(resumption.checkpoint.manifest, plan.machine)
        known = replace(plan.known, before=before)
        plan = make_plan(config, skeleton.spec, skeleton.layouts, plan.machine, known)
    if is_hopeless(config, skeleton, plan):
        refuse_what_does_not_fit(plan)  # before any data is read
    if resumption is None and config.model.init == "pretrained":
        weights_of(config, skeleton)  # tokenising may take an hour: what is missing is said before
    start = START if resumption is None else resumption.position
    rows = take_rows(config, skeleton, plan, console, start)
    data = data_facts(config, rows)
    source = Path(config.model.path)
    model = model_facts(skeleton, (source / "config.json").read_bytes())
    lineage: tuple[dict[str, JsonValue], ...] = ()
    if resumption is not None:
        lineage = _check_resumption(resumption, data, model, plan)
        saved_rows, step = resumption.checkpoint.manifest.data, resumption.position.step
        for note in notes_on_other_rows(saved_rows, data, step):
            console.note(note)
        evaluated = note_on_other_evaluation(rows, folder.metrics)
        if evaluated is not None:
            console.note(evaluated)
    with device_errors(config.train.micro_batch_size):
        plan, functions = warm_up(config, skeleton, plan, rows.longest, console, rows.facts)
    refuse_what_does_not_fit(plan)  # measured, it may need more than it seemed
    rows = rows.planned(plan.decisions)
    # Rows of a step are settled in a run that goes on.
    console.plan(plan if resumption else warned(config, skeleton, plan))
    _note_padding(plan, rows, console)
    if resumption is not None:
        saved = resumption.checkpoint.manifest.numerics
        line = not_bit_exact(differences(saved, numerics_of(skeleton, plan)))
        if line is not None:
            console.note(line)
    limit = note_on_cpu_time()
    if limit is not None:
        console.note(limit)
    for name in remove_leftovers(fs, folder.checkpoints):  # they take the room of a checkpoint
        console.note(f"removed {name}, which a save that was cut short had left")
    storage = look_at_disk(config.checkpoint, plan, folder, resumption, console.note)
    aux = {
        **model_files(source, DTYPES[config.model.dtype], rows.stop_ids),
        **({TEMPLATE_NAME: rows.chat_template.encode()} if rows.chat_template else {}),
        SAVED_CONFIG: dump_config(recorded).encode(),
        SAVED_PLAN: json.dumps(plan.to_json(), indent=2).encode() + b"\n",
    }
    return Prepared(skeleton, plan, functions, rows, data, model, storage, aux, lineage)


@contextmanager
def device_errors(num_rows: int) -> Iterator[None]:
    """Turn the device's lack of memory, or its failure, into one clear line.

    A device fails behind the host's back: what it was asked last is told of it, an op or not.

    Args:
        num_rows: That pass through a layer at once.

    Raises:
        DeviceError: What the block raised was that; all else is raised as it is.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DeviceError(
            f"The GPU ran out of memory with {show_number(num_rows, 'row')} in a layer at once: "
            f"{str(error).splitlines()[0]} Set `pipeline.activations: recompute`, or a smaller "
            "`train.micro_batch_size`."
        ) from error
    except RuntimeError as error:
        reason = device_failure(error)
        if reason is None:
            raise
        raise DeviceError(f"The device failed ({reason}). Look at the driver's log.") from error


def _check_resumption(
    resumption: Resumption, data: DataFacts, model: ModelFacts, plan: RunPlan
) -> tuple[dict[str, JsonValue], ...]:
    """Refuse what is not the checkpoint's; the lineage with what was allowed to change."""
    manifest = resumption.checkpoint.manifest
    check_model(manifest.model, model)
    check_dtypes(manifest.dtypes, dtypes_of(plan.decisions))
    changed = check_data(manifest.data, data, resumption.config.allowed, resumption.position.step)
    return (*resumption.lineage, *changed)


def refuse_what_does_not_fit(plan: RunPlan) -> None:
    """End a run whose bill exceeds host RAM or GPU memory.

    Raises:
        PlanError: It does; with what would help.
    """
    if plan.shortfalls:
        raise PlanError("\n".join(plan.shortfalls))


def take_rows(
    config: TrainConfig,
    skeleton: Skeleton,
    plan: RunPlan,
    console: RunConsole,
    start: Position = START,
) -> TrainingRows:
    """Read all rows, look at them with the model's eyes, and show what became of them.

    Args:
        config: What was asked.
        skeleton: Of the model that is to take them.
        plan: Made before they were known.
        console: Hears how far it has come, the account, and one row as it is learnt.
        start: Where a resumed run goes on.

    Raises:
        MegatrainError: As `load_rows`, and as `check_examples`.
    """
    rows = load_rows(config, plan.decisions, start, console.note, console.preparing)
    check_examples(rows.examples, skeleton, Path(config.model.path))
    if rows.evaluation is not None:
        check_examples(rows.evaluation.documents.examples, skeleton, Path(config.model.path))
    for line in rows.lines():
        console.note(line)
    console.first_row(rows.example)
    return rows


def _note_padding(plan: RunPlan, rows: TrainingRows, console: RunConsole) -> None:
    if plan.decisions.compiled and rows.padding > NOTED_PADDING:
        console.note(
            f"{rows.padding:.0%} of the layers' work is on padding: compiled rows all have the "
            f"length of the longest, {show_number(plan.decisions.max_length, 'token')}. A lower "
            "`data.max_length`, or `pipeline.compile: false`, may be faster."
        )
