"""Why a checkpoint could not be loaded, where whoever chose it may choose again."""

from pathlib import Path

from megatrain_cli.errors import CorruptError


class DamagedCheckpoint(Exception):  # noqa: N818  told to whoever chose the checkpoint
    """A checkpoint was found to be damaged while it was loaded; nothing has changed yet."""

    def __init__(self, folder: Path, reason: CorruptError) -> None:
        self.folder, self.reason = folder, reason
        super().__init__(str(reason))


class LockRefused(Exception):  # noqa: N818  told to whoever can plan without it
    """The driver refused to page-lock a layer of a store that is being loaded."""
