"""Names in a run's folder of checkpoints."""

import re

CHECKPOINTS = "checkpoints"
"""Folder, in a run's, of its checkpoints."""

MANIFEST = "manifest.json"
"""Written last: a folder without a valid one is no checkpoint."""

LATEST = "latest.json"
"""A hint beside the checkpoints."""

TRAINING = "training"
"""Folder, in a checkpoint, of all that a plain Hugging Face folder does not have."""

KEEP = "KEEP"
"""A file that a person places in a checkpoint, so that it is never retired."""

TEMPORARY = ".tmp-"
TRASH = ".trash-"
"""Begin the names of what is being written and of what is being removed; never read."""


def folder_name(step: int) -> str:
    """Name of a step's checkpoint. Steps are compared as integers, never as names."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step that a folder's name tells, however many zeros it has; None if it tells none."""
    found = re.fullmatch(r"step-([0-9]{1,18})", name)
    return int(found[1]) if found else None


TEMPLATE_NAME = "chat_template.jinja"
"""The chat template that a model is used with, as a file of its folder."""
