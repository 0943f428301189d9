"""What a run tells a checkpoint about itself: everything but the tensors and the files."""

from pydantic import JsonValue

from megatrain_cli.checkpoint.record import (
    CheckpointId,
    Count,
    HexFloat,
    Identity,
    Record,
    Sha256,
    Xxh128,
)


class Pending(Record):
    """An update that some layers, or all, still need; those have a part with their gradients.

    Attributes:
        step: The update's number: layers that have had it stand at `step`, others one before.
        learning_rate: Of that update.
        grad_scale: What gradients are multiplied with, so that their norm is clipped.
    """

    step: int
    learning_rate: HexFloat
    grad_scale: HexFloat


class SourceFile(Record):
    """A data file as it was when the run began; `path` is a hint, the hash decides."""

    name: str
    path: str
    bytes: Count
    xxh3_128: Xxh128


class DataFacts(Record):
    """Which rows there are, in which order they come, and how far the run has read.

    Attributes:
        rows_xxh3_128: Of all token ids, offsets and labels.
        order: Names the rule that makes the order from `seed`, epoch and row.
        next_row: Rows consumed so far, over all epochs.
    """

    rows_xxh3_128: Xxh128
    num_rows: Count
    sources: tuple[SourceFile, ...]
    order: str
    seed: int
    shuffle: bool
    next_row: Count
    rows_per_step: Count


class ModelFacts(Record):
    """Which model it is.

    Attributes:
        config_sha256: Of the canonical JSON of what decides names, shapes and arithmetic.
        tied: Names of weights that are another name of one that is stored, so not stored.
    """

    architecture: str
    config_sha256: Sha256
    num_layers: Count
    num_parameters: Count
    vocab_size: Count
    tied: tuple[str, ...]


class Facts(Record):
    """A run at a step boundary, or within an update if `pending`.

    Attributes:
        attempt: Counts the starts of the run, from 1; orders checkpoints before `step` does.
        parent: Id of the checkpoint that this attempt resumed from, or saved before this one.
        step: Updates completed: the largest `layer_step`.
        target_steps: At which step the run ends.
        dtypes: Of `weights`, `exp_avg`, `exp_avg_sq` by safetensors' name; `master` names how
            masters are kept, or is null.
        losses_tail: The last losses, newest last.
        changes: Config changes that a person allowed on resume, oldest first.
    """

    run_id: Identity
    attempt: Count
    parent: CheckpointId | None
    step: Count
    finished: bool
    target_steps: Count
    pending: Pending | None
    model: ModelFacts
    dtypes: dict[str, str | None]
    optimizer: dict[str, JsonValue]
    schedule: dict[str, JsonValue]
    data: DataFacts
    numerics: dict[str, JsonValue]
    plan: dict[str, JsonValue]
    losses_tail: tuple[HexFloat, ...]
    changes: tuple[dict[str, JsonValue], ...]
