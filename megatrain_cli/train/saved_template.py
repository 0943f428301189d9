"""Which chat template a resumed run goes on with.

A run's template is part of what is learnt. Its text travels in each checkpoint, under the name that
the trained model needs anyway, so that the file it was read from may change, move or go.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import xxhash

from megatrain_cli.checkpoint.folder import OpenCheckpoint
from megatrain_cli.checkpoint.names import TEMPLATE_NAME
from megatrain_cli.config.changes import Change
from megatrain_cli.config.kinds import TEMPLATES
from megatrain_cli.data.template_file import read_template
from megatrain_cli.errors import CorruptError, DataError

_KEY = "data.template"
# The tokenizer's own is put aside: there is no text to keep.
_NONE = "none"


@dataclass(frozen=True)
class SavedTemplate:
    """What was decided.

    Attributes:
        path: The checkpoint's copy, to be read instead of what the config names; None where the
            config decides: no template was given, or another one is.
        same: Whether what the config names now, whatever its place, is the text of the checkpoint.
        notes: What the user should be told.
        change: For the lineage: the same file with another text.
    """

    path: Path | None = None
    same: bool = True
    notes: tuple[str, ...] = ()
    change: Change | None = None


def find_saved_template(
    checkpoint: OpenCheckpoint, saved: str | None, wanted: str | None, allowed: Collection[str]
) -> SavedTemplate:
    """Compare the checkpoint's template with what the config names now.

    Args:
        checkpoint: Open.
        saved: `data.template` when it was made.
        wanted: The same now.
        allowed: Keys that may change what is learnt.

    Raises:
        CorruptError: The checkpoint lacks its copy.
    """
    if saved in (None, _NONE):
        return SavedTemplate(same=saved == wanted)
    held = checkpoint.folder / TEMPLATE_NAME
    try:
        was = checkpoint.read_aux(TEMPLATE_NAME).decode()
    except (KeyError, UnicodeDecodeError) as error:
        raise CorruptError(f"{held}: missing or no text; the run cannot go on from it.") from error
    if wanted is None or wanted in TEMPLATES:
        return SavedTemplate(held) if wanted == saved else SavedTemplate(same=False)
    try:
        now = read_template(Path(wanted))
    except DataError as error:
        if wanted != saved:  # it was named just now
            return SavedTemplate(same=False)
        return SavedTemplate(
            held, notes=(f"{error}; the run goes on with the copy in its checkpoint",)
        )
    if now == was:
        return SavedTemplate(held)
    if wanted != saved:
        return SavedTemplate(same=False)
    if _KEY in allowed:
        change = Change(_KEY, _shown(saved, was), _shown(wanted, now), "meaning")
        return SavedTemplate(change=change)
    note = (
        f"{wanted}: not the chat template that the run was begun with; the run goes on with that "
        f"one, from its checkpoint. For the new one add `--allow-change {_KEY}`."
    )
    return SavedTemplate(held, notes=(note,))


def _shown(name: str | None, text: str) -> str:
    """A template by its place and content."""
    return f"{name} (xxh3-128 {xxhash.xxh3_128_hexdigest(text.encode())})"
