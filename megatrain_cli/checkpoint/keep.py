"""Which checkpoints to retire after one was committed. Decides; removes nothing."""

from collections.abc import Collection, Sequence
from pathlib import Path

from megatrain_cli.checkpoint.resolve import Candidate


def which_to_remove(
    found: Sequence[Candidate],
    *,
    run_id: str,
    keep_last: int,
    keep_every: int | None = None,
    protected: Collection[Path] = (),
) -> list[Candidate]:
    """Whole checkpoints of this run that no rule keeps.

    What is broken, of another run or unreadable is never removed, and does not count: a person
    should see it, and it must not push out one that can be resumed from.

    Args:
        found: All checkpoints of the run's folder, in any order, looked at after the commit.
        run_id: The run's identity.
        keep_last: The newest that stay, at least 1.
        keep_every: Multiples of it, in steps, stay.
        protected: Folders that stay, as the one that was just committed.

    Returns:
        Oldest first, so that a removal that is cut short leaves the newer ones.
    """
    assert keep_last >= 1, "the newest checkpoint is never removed"
    safe = {folder.name for folder in protected}
    ours = [
        one
        for one in found
        if one.problem is None and one.manifest is not None and one.manifest.run_id == run_id
    ]
    ours.sort(key=lambda one: one.order)
    return [
        one
        for one in ours[:-keep_last]
        if not (keep_every and one.step % keep_every == 0)
        and not (one.kept or one.hinted or one.folder.name in safe)
    ]


def which_to_prune(found: Sequence[Candidate]) -> list[Candidate]:
    """Whole checkpoints that a full disk may cost a run: all but the newest and those with `KEEP`.

    Args:
        found: Of the run, newest first, as `candidates` of its id gives them.
    """
    whole = [one for one in found if one.problem is None]
    return [one for one in whole[1:] if not one.kept]
