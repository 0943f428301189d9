"""Rules that concern more than one key, and keys that have no effect where they stand."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megatrain_cli.config.paths import is_hub_id, split_entry
from megatrain_cli.config.schema import CheckpointSection, DataSource, TrainConfig
from megatrain_cli.units import show_number


@dataclass(frozen=True)
class Finding:
    """Something to say about a config.

    Attributes:
        key: The dotted key that is shown, with the line where it stands.
        message: What is wrong, then what to do.
        reads: Other keys that the rule looked at. Where one of them is wrong already, the finding
            would rest on a value that was never meant, and is not shown.
    """

    key: str
    message: str
    reads: tuple[str, ...] = ()


def find_conflicts(config: TrainConfig, explicit: frozenset[str]) -> Iterator[Finding]:
    """Combinations of values that cannot be trained with."""
    train, optimizer, schedule = config.train, config.optimizer, config.schedule
    if (train.max_steps is None) == (train.num_epochs is None):
        both = train.max_steps is not None
        yield Finding(
            "train.num_epochs" if both else "train.max_steps",
            "set together with `train.max_steps`; set exactly one of them and the other to null"
            if both
            else "missing; set exactly one of `train.max_steps` and `train.num_epochs`",
            ("train.max_steps", "train.num_epochs"),
        )
    for source in config.data.train:
        yield from _idle_of_source(source, "data.train")
    yield from _evaluation(config)
    if schedule.warmup_steps and schedule.warmup_ratio is not None:
        yield Finding(
            "schedule.warmup_ratio",
            "set together with `schedule.warmup_steps`; remove one of them",
            ("schedule.warmup_steps",),
        )
    if optimizer.master != "fp32" and config.model.dtype != "bfloat16":
        yield Finding(
            "optimizer.master" if "optimizer.master" in explicit else "model.dtype",
            f"`optimizer.master: {optimizer.master}` needs `model.dtype: bfloat16`, not "
            f"{config.model.dtype}. Set one of `optimizer.master: fp32` and"
            " `model.dtype: bfloat16`",
            ("optimizer.master", "model.dtype"),
        )
    if optimizer.update == "eager" and optimizer.max_grad_norm is not None:
        yield Finding(
            "optimizer.update",
            "`eager` updates a layer before the gradient norm is known, so it cannot clip. Set"
            " `optimizer.max_grad_norm: null`, or `optimizer.update: auto`",
            ("optimizer.max_grad_norm",),
        )
    if optimizer.update == "eager" and config.checkpoint.include_gradients:
        yield Finding(
            "checkpoint.include_gradients",
            "with `optimizer.update: eager` no gradient outlives its update. Set false, or"
            " `optimizer.update: auto`",
            ("optimizer.update",),
        )


def find_idle(config: TrainConfig) -> Iterator[Finding]:
    """Keys that do nothing in this config; said only where the user set them."""
    yield from _idle_checkpoint(config.checkpoint)
    if config.optimizer.master in {"bf16", "bf16_stochastic"}:
        what = (
            "changes below half a BF16 step are lost: at a learning rate of 1e-5 about 16 in 100"
            " weights move in a step"
            if config.optimizer.master == "bf16"
            else "changes below a BF16 step happen by chance, right on average only"
        )
        yield Finding(
            "optimizer.master",
            f"{what}. `fp32_split` is exact, for 2 more bytes a parameter",
        )
    if config.schedule.type == "constant":
        yield Finding("schedule.min_lr_ratio", "has no effect with `schedule.type: constant`")
    if config.optimizer.learning_rate == 0:
        yield Finding("optimizer.learning_rate", "at 0 no weight changes")
    if config.schedule.warmup_ratio == 1:
        yield Finding("schedule.warmup_ratio", "the learning rate still rises when the run ends")
    steps, warmup = config.train.max_steps, config.schedule.warmup_steps
    if steps and warmup >= steps:
        yield Finding(
            "schedule.warmup_steps",
            f"the learning rate still rises when the run ends: {warmup} warm-up steps, {steps} in"
            " all",
        )
    if config.pipeline.device == "cpu":
        yield Finding(
            "pipeline.target_pcie_utilization",
            "has no effect on the CPU: nothing is copied to a device",
        )
        if config.store.memory == "pinned":
            yield Finding("store.memory", "has no effect on the CPU: nothing is copied to a device")
        if config.train.deterministic:
            yield Finding(
                "train.deterministic",
                "has no effect on the CPU: runs with as many threads repeat bit for bit anyway",
            )
    sources = (*config.data.train, *(config.data.eval or ()))
    if all(one.format is not None or split_entry(one.path)[1] is not None for one in sources):
        yield Finding("data.format", "has no effect: every source of rows has a format of its own")
    if config.data.on_bad_row == "error":
        yield Finding("data.max_bad_share", "has no effect with `data.on_bad_row: error`")
    if config.data.packing:
        yield Finding(
            "model.attention",
            "has no effect with `data.packing`: packed rows have an attention of their own",
        )
    if config.data.train_on_prompt and config.data.format == "text":
        yield Finding("data.train_on_prompt", "has no effect on texts: they have no prompt")


def _evaluation(config: TrainConfig) -> Iterator[Finding]:
    data, both = config.data, ("data.eval", "data.eval_share")
    for source in data.eval or ():
        yield from _idle_of_source(source, "data.eval")
        if source.weight is not None:
            yield Finding(
                "data.eval",
                f"`weight` of {source.path}: each row is evaluated once. Remove the key",
            )
    if data.eval is not None and data.eval_share is not None:
        yield Finding(
            "data.eval_share", "set together with `data.eval`; set one of them to null", both
        )
    if not data.is_evaluated:
        message = "there are no rows to evaluate on. Set `data.eval` or `data.eval_share`"
        if config.eval.steps is not None:
            yield Finding("eval.steps", f"{message}, or this to null", both)
        if config.eval.at_start:
            yield Finding("eval.at_start", f"{message}, or this to false", both)


def _idle_of_source(source: DataSource, where: str) -> Iterator[Finding]:
    """Keys of a source that say what the source cannot have."""
    _, entry = split_entry(source.path)
    of_hub = {"subset", "split", "revision", "streaming"}
    of_files = {"sample_by"}
    if entry is not None:
        idle, why = {"format", "columns", "tags", *of_hub, *of_files}, "the entry decides that"
    elif is_hub_id(source.path):
        idle, why = of_files, "a data set of a hub has columns"
    else:
        idle, why = of_hub, "a file or a folder has none; name the files that you want"
    for key in sorted(idle):
        if getattr(source, key) is not None:
            yield Finding(where, f"`{key}` of {source.path}: {why}. Remove the key")


def _idle_checkpoint(checkpoint: CheckpointSection) -> Iterator[Finding]:
    every, milestone = checkpoint.save_steps, checkpoint.keep_every_steps
    if milestone is not None and every is not None and milestone % every:
        yield Finding(
            "checkpoint.keep_every_steps",
            f"a checkpoint is written every {show_number(every, 'step')}, so only those of every"
            f" {math.lcm(every, milestone)} steps are kept by it",
        )
    if milestone is not None and every is None:
        yield Finding(
            "checkpoint.keep_every_steps",
            "has no effect on most runs: without `checkpoint.save_steps` one is written at the end,"
            " on a stop and on SIGUSR1, and rarely at a multiple of it",
        )
    if not checkpoint.async_save:
        yield Finding(
            "checkpoint.bounce_pool", "has no effect while `checkpoint.async_save` is false"
        )
