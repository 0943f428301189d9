"""Names in a run's folder of checkpoints."""

MANIFEST = "manifest.json"
"""Written last: a folder without a valid one is no checkpoint."""

LATEST = "latest.json"
"""A hint beside the checkpoints."""

TRAINING = "training"
"""Folder, in a checkpoint, of all that a plain Hugging Face folder does not have."""

TEMPORARY = ".tmp-"
TRASH = ".trash-"
"""Begin the names of what is being written and of what is being removed; never read."""


def folder_name(step: int) -> str:
    """Name of a step's checkpoint. Steps are compared as integers, never as names."""
    return f"step-{step:08d}"
