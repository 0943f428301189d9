"""What has no effect on a run that goes on: an edited `config.yaml`, and words of `resume`.

A run goes on with its checkpoint's config. Who edits the file would see no effect, and be told of
none; and what an attempt changed is lost where it was killed before its first save.
"""

from collections.abc import Sequence
from pathlib import Path

from megatrain_cli.config.changes import Change, allowed_keys, compare, show_value
from megatrain_cli.config.load import parse_config
from megatrain_cli.config.schema import TrainConfig
from megatrain_cli.errors import ConfigError

# Where the run lay when each was written: it may have been moved since.
_PLACES = frozenset({"train.output_dir"})


def notes_on_edited(path: Path, saved: TrainConfig, given: frozenset[str]) -> tuple[str, ...]:
    """What to say of what stands in the file and has no effect.

    Args:
        path: The run folder's config; nothing is said if it is gone or cannot be read.
        saved: The checkpoint's.
        given: Keys that the command line sets: what the file says of them was answered.
    """
    try:
        text = path.read_bytes().decode()
        found = parse_config(text, path, (), path.parent).config
    except OSError:
        return ()
    except (UnicodeDecodeError, ConfigError):
        return (f"{path} is no config any more. A run goes on with its checkpoint's.",)
    differing = [
        change
        for change in compare(saved, found)
        if change.key not in _PLACES and change.key not in given
    ]
    if not differing:
        return ()
    shown = "; ".join(
        f"{change.key} is {show_value(change.new)} there and stays {show_value(change.old)}"
        for change in differing
    )
    said = (
        f"{path} has no effect, as a run goes on with its checkpoint's config: {shown}. Give what "
        f"is to change on the command line, as `{differing[0].key}=...`."
    )
    return (said,)


def idle_on_resume(
    changes: Sequence[Change], config: TrainConfig, allow_change: Sequence[str], step: int
) -> tuple[str, ...]:
    """What was asked of `resume` and changes nothing.

    Args:
        changes: All keys that differ from the checkpoint's config.
        config: In force.
        allow_change: As on the command line.
        step: Where the run goes on.
    """
    changed = {change.key for change in changes}
    notes = []
    for key in sorted(allowed_keys(allow_change) - changed):
        section, _, leaf = key.partition(".")
        if section == "data":  # allows rows to be others than they were, under the same value
            continue
        value = config.model_dump(mode="json")[section][leaf]
        notes.append(
            f"--allow-change {key}: the key stays {show_value(value)}. Give it a new value, as "
            f"`{key}=...`"
        )
    if config.eval.at_start and "eval.at_start" in changed and step > 0:
        notes.append(f"eval.at_start: has no effect: the run is at step {step} already")
    return tuple(notes)
