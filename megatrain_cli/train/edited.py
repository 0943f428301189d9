"""A run folder's `config.yaml` that says something else than the checkpoint it goes on from.

A run goes on with its checkpoint's config. Who edits the file would see no effect, and be told of
none; and what an attempt changed is lost where it was killed before its first save.
"""

from pathlib import Path

from megatrain_cli.config.changes import compare, show_value
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
