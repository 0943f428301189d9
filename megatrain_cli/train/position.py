"""How far a run has come, as a checkpoint says it and as its rows need it."""

from dataclasses import dataclass

from megatrain_cli.checkpoint.manifest import Manifest


@dataclass(frozen=True)
class Position:
    """Optimizer steps whose rows were taken, and how many rows they took over all epochs.

    Two numbers and not one: a run that goes on with another batch size has taken as many rows as it
    has, whatever its steps from now on take.
    """

    step: int = 0
    row: int = 0


START = Position()
"""Of a run that begins."""


def position_of(manifest: Manifest) -> Position:
    """Where a run goes on from a checkpoint: the rows of a pending update have been taken."""
    step = manifest.step if manifest.pending is None else manifest.pending.step
    return Position(step, manifest.data.next_row)
