"""Which keys of a run's config may change when it is resumed, and who has to say so.

identity  is in the checkpoint's bytes: another value cannot be resumed with.
meaning   decides what is learnt: it changes only where the user names it.
runtime   decides how it is computed and kept: it changes freely. What of it can change a bit is in
          the numerics fingerprint, and said there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from pydantic import JsonValue

from megatrain_cli.config.aliases import ALIASES
from megatrain_cli.config.names import nearest
from megatrain_cli.config.schema import TrainConfig
from megatrain_cli.errors import ConfigError, IncompatibleError

Kind = Literal["identity", "meaning", "runtime"]
KINDS: tuple[Kind, ...] = get_args(Kind)

CLASSES: Mapping[str, Kind] = {
    "model.path": "identity",  # the checkpoint is the model's folder
    "model.init": "identity",
    "model.dtype": "identity",
    "model.attention": "runtime",
    "model.trust_remote_code": "runtime",
    "data.train": "meaning",
    "data.eval": "runtime",
    "data.eval_share": "meaning",  # decides which rows are trained on
    "data.format": "meaning",
    "data.template": "meaning",
    "data.on_bad_row": "meaning",
    "data.max_bad_share": "runtime",
    "data.max_length": "meaning",
    "data.packing": "identity",  # the position counts packs, or documents
    "data.overlong": "meaning",
    "data.train_on_prompt": "meaning",
    "data.shuffle": "meaning",
    "data.workers": "runtime",
    "data.cache_dir": "runtime",
    "train.output_dir": "runtime",
    "train.max_steps": "meaning",
    "train.num_epochs": "meaning",
    "train.micro_batch_size": "meaning",
    "train.gradient_accumulation_steps": "meaning",
    "train.seed": "meaning",
    "train.deterministic": "runtime",
    "optimizer.learning_rate": "meaning",
    "optimizer.betas": "meaning",
    "optimizer.eps": "meaning",
    "optimizer.weight_decay": "meaning",
    "optimizer.max_grad_norm": "meaning",
    "optimizer.master": "identity",
    "optimizer.update": "runtime",
    "optimizer.threads": "runtime",
    "schedule.type": "meaning",
    "schedule.warmup_steps": "meaning",
    "schedule.warmup_ratio": "meaning",
    "schedule.min_lr_ratio": "meaning",
    "pipeline.device": "runtime",
    "pipeline.grad_slabs": "runtime",
    "pipeline.staging_buffers": "runtime",
    "pipeline.staging_bytes": "runtime",
    "pipeline.target_pcie_utilization": "runtime",
    "pipeline.activations": "runtime",
    "pipeline.compile": "runtime",
    "store.memory": "runtime",
    "checkpoint.save_steps": "runtime",
    "checkpoint.keep_last": "runtime",
    "checkpoint.keep_every_steps": "runtime",
    "checkpoint.async_save": "runtime",
    "checkpoint.bounce_pool": "runtime",
    "checkpoint.include_gradients": "runtime",
    "checkpoint.on_error": "runtime",
    "checkpoint.on_disk_full": "runtime",
    "checkpoint.grace_seconds": "runtime",
    "checkpoint.paranoid": "runtime",
    "logging.log_steps": "runtime",
    "logging.tensorboard": "runtime",
    "eval.steps": "runtime",
    "eval.at_start": "runtime",
}
"""Every dotted key of the schema."""

_ROWS = ("train.micro_batch_size", "train.gradient_accumulation_steps")
_LENGTH = ("train.max_steps", "train.num_epochs")


@dataclass(frozen=True)
class Change:
    """One key whose value differs; values as JSON."""

    key: str
    old: JsonValue
    new: JsonValue
    kind: Kind

    def text(self) -> str:
        """For messages: `optimizer.learning_rate: 1e-05 -> 2e-05`."""
        return f"{self.key}: {show_value(self.old)} -> {show_value(self.new)}"

    def lineage(self, step: int) -> dict[str, JsonValue]:
        """For the manifest, which holds no floats: these are their hexadecimal texts.

        Args:
            step: Steps completed when it took effect.
        """
        return {"step": step, "key": self.key, "old": exact(self.old), "new": exact(self.new)}


def compare(saved: TrainConfig, wanted: TrainConfig) -> list[Change]:
    """All keys that differ, in the schema's order.

    Where a data file lies is no meaning: what is in it is compared by content. Nor is how the rows
    of a step are divided into micro-batches, as long as they are as many. A longer run is only an
    extension of the same one and counts as runtime.
    """
    before, after = _flat(saved), _flat(wanted)
    changes = []
    for key, kind in CLASSES.items():
        old, new = before[key], after[key]
        if old == new:
            continue
        is_same_run = (
            (key == "data.train" and _without_paths(old) == _without_paths(new))
            or (key in _ROWS and _rows(saved) == _rows(wanted))
            or (key in _LENGTH and _is_longer(saved, wanted))
        )
        changes.append(Change(key, old, new, "runtime" if is_same_run else kind))
    return changes


def is_extended(changes: Sequence[Change]) -> bool:
    """Whether the run's length is among what changed."""
    return any(change.key in _LENGTH for change in changes)


def allowed_keys(words: Sequence[str]) -> frozenset[str]:
    """The keys that `--allow-change` names: dotted, or the last part where it is one key's alone.

    Args:
        words: Each may hold several, with commas between them.

    Raises:
        ConfigError: A word that names no key, several keys, or one that can never change.
    """
    problems, keys = [], set()
    for word in (part.strip() for text in words for part in text.split(",")):
        found = [key for key in CLASSES if word in (key, key.partition(".")[2])]
        if len(found) == 1 and CLASSES[found[0]] != "identity":
            keys.add(found[0])
        else:
            problems.append(f"--allow-change: {_explain(word, found)}")
    if problems:
        raise ConfigError(problems)
    return frozenset(keys)


def check_changes(changes: Sequence[Change], allowed: frozenset[str]) -> tuple[Change, ...]:
    """Refuse what may not change.

    Returns:
        Those that belong in the checkpoint's lineage: all that were allowed by name, and a new
        length of the run.

    Raises:
        IncompatibleError: One line for each change that is refused, with what to do.
    """
    refused = []
    for change in changes:
        if change.key == "model.path":
            refused.append(f"{change.text()}: the model is in the checkpoint; leave the key out")
        elif change.kind == "identity":
            refused.append(
                f"{change.text()}: the checkpoint was made with the first and holds no other. "
                "Leave the key out, or begin a new run with `megatrain train`"
            )
        elif change.kind == "meaning" and change.key not in allowed:
            refused.append(
                f"{change.text()}: it decides what is learnt. Leave it as it was, or add "
                f"`--allow-change {change.key}`"
            )
    if refused:
        raise IncompatibleError("\n".join(refused))
    return tuple(c for c in changes if c.kind == "meaning" or c.key in _LENGTH)


def exact(value: JsonValue) -> JsonValue:
    """The value with floats as hexadecimal texts, which are the same in every language."""
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, list):
        return [exact(item) for item in value]
    if isinstance(value, dict):
        return {key: exact(item) for key, item in value.items()}
    return value


def _flat(config: TrainConfig) -> dict[str, JsonValue]:
    sections = config.model_dump(mode="json")
    return {f"{s}.{leaf}": value for s, keys in sections.items() for leaf, value in keys.items()}


def _without_paths(sources: JsonValue) -> list[dict[str, JsonValue]]:
    assert isinstance(sources, list)
    kept = []
    for source in sources:
        assert isinstance(source, dict)
        kept.append({key: value for key, value in source.items() if key != "path"})
    return kept


def _rows(config: TrainConfig) -> int:
    return config.train.micro_batch_size * config.train.gradient_accumulation_steps


def _is_longer(saved: TrainConfig, wanted: TrainConfig) -> bool:
    """Longer in the same unit. In another one it cannot be told before the data is read."""
    old, new = saved.train, wanted.train
    if old.max_steps is not None and new.max_steps is not None:
        return new.max_steps > old.max_steps
    if old.num_epochs is not None and new.num_epochs is not None:
        return new.num_epochs > old.num_epochs
    return False


def _explain(word: str, found: Sequence[str]) -> str:
    if len(found) > 1:
        return f"`{word}` may be {' or '.join(f'`{key}`' for key in found)}. Name one of them"
    if found:
        return f"`{found[0]}` is part of what the checkpoint is; it cannot change on resume"
    if word in ALIASES:
        tool, key = ALIASES[word]
        return f"there is no key `{word}`; this is {tool}'s name for `{key}`"
    near = nearest(word, [*CLASSES, *(key.partition(".")[2] for key in CLASSES)])
    return f"there is no key `{word}`" + (f". Did you mean `{near}`?" if near else "")


def show_value(value: JsonValue) -> str:
    """A key's value for messages."""
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        return ", ".join(show_value(item) for item in value)
    if isinstance(value, dict):
        shown = ", ".join(f"{k}: {show_value(v)}" for k, v in value.items() if v is not None)
        return f"{{{shown}}}"
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)
