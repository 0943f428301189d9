"""Whether the disk takes a run's checkpoints, and what follows by the config where it is short."""

from collections.abc import Callable

from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.checkpoint.keep import which_to_prune
from megatrain_cli.checkpoint.resolve import candidates
from megatrain_cli.checkpoint.storage import StorageFacts, check_storage
from megatrain_cli.config.schema import CheckpointSection
from megatrain_cli.errors import StorageError
from megatrain_cli.limits import largest_file
from megatrain_cli.plan.checkpoints import largest_file_bytes
from megatrain_cli.plan.plan import RunPlan
from megatrain_cli.train.folder import RunFolder
from megatrain_cli.train.resume import Resumption
from megatrain_cli.units import show_bytes


def look_at_disk(
    config: CheckpointSection,
    plan: RunPlan,
    folder: RunFolder,
    resumption: Resumption | None,
    note: Callable[[str], None],
) -> StorageFacts:
    """Write, sync and rename on trial, and compare what is free with what checkpoints will take.

    Args:
        config: What a save that finds the disk full does.
        plan: Knows the bytes.
        folder: Of the run; its lock is held.
        resumption: Where the run goes on; None for a new one.
        note: Hears where room is short, and what the run will do about it.

    Raises:
        DiskFullError: There is no room for a checkpoint, and the run can make none.
        StorageError: The folder cannot be written, or no file may be as large as one will be.
    """
    fs, need = FileSystem(), plan.checkpoint_bytes
    _refuse_large_files(plan, folder)
    spare = 0
    if config.on_disk_full == "skip":
        spare = need
    elif config.on_disk_full == "prune" and resumption is not None:
        spare = _prunable_bytes(fs, folder, resumption)
    storage = check_storage(fs, folder.checkpoints, need, spare)
    have = f"{folder.checkpoints} has {show_bytes(storage.free_bytes)} free"
    how = f"(`checkpoint.on_disk_full: {config.on_disk_full}`)"
    if storage.free_bytes >= plan.folder_bytes:
        return storage
    if storage.free_bytes >= need:
        total = show_bytes(plan.folder_bytes)
        note(f"{have}, and all checkpoints that are kept at once will need up to {total}.")
    elif config.on_disk_full == "skip":
        note(
            f"{have}, and a checkpoint needs {show_bytes(need)}: none is saved until there is room "
            f"{how}. Without room for the last one the run ends with nothing new saved."
        )
    else:
        note(
            f"{have}, and a checkpoint needs {show_bytes(need)}: older ones of "
            f"{show_bytes(spare)} will be removed for the next {how}."
        )
    return storage


def _refuse_large_files(plan: RunPlan, folder: RunFolder) -> None:
    """The first save would fail, after all the steps before it."""
    allowed = largest_file()
    largest = largest_file_bytes(plan.layer_numels, plan.decisions.tile_format)
    if allowed is not None and allowed < largest:
        raise StorageError(
            f"{folder.checkpoints}: a checkpoint has files of up to {show_bytes(largest)}, and "
            f"`ulimit -f` allows no more than {show_bytes(allowed)}. Raise it "
            "(`ulimit -f unlimited`)."
        )


def _prunable_bytes(fs: FileSystem, folder: RunFolder, resumption: Resumption) -> int:
    """Of the checkpoints that a full disk may cost; those that are set aside free nothing."""
    aside = {path.name for path in resumption.choice.superseded}
    found = candidates(folder.path, fs, resumption.checkpoint.manifest.run_id)
    stay = [one for one in found if one.folder.name not in aside]
    return sum(one.manifest.bytes_total for one in which_to_prune(stay) if one.manifest is not None)
