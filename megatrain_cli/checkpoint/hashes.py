"""Every byte of a checkpoint's files against the hashes in its manifest, files in parallel."""

from collections.abc import Iterable

from megatrain_cli.checkpoint.folder import OpenCheckpoint
from megatrain_cli.checkpoint.pieces import spread
from megatrain_cli.checkpoint.verify import check_part
from megatrain_cli.errors import CorruptError


def check_files(
    checkpoint: OpenCheckpoint, files: Iterable[str], threads: int
) -> list[CorruptError]:
    """Read files whole, the largest first, a few MiB a thread at a time.

    Returns:
        One error for each file that is not what was saved; empty if all are.
    """
    parts = {part.file: part for part in checkpoint.manifest.parts}
    sizes = {entry.file: entry.bytes for entry in checkpoint.manifest.files}

    def check(file: str) -> CorruptError | None:
        try:
            if file in parts:
                check_part(checkpoint, parts[file])
            else:
                checkpoint.read_aux(file)
        except CorruptError as error:  # the other files may be whole
            return error
        return None

    ordered = sorted(files, key=lambda file: (-sizes[file], file))
    return [error for error in spread(check, ordered, threads) if error is not None]
