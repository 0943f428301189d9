"""Every error a user can meet, as one tree: what is wrong, with the numbers; then what to do.

MegatrainError            exit code
├── ConfigError           1   the config file or an override is wrong
├── DataError             1   a data file or a row cannot be used
│   └── RowError          1   one row cannot be used; others may be
├── ModelError            1   a model folder or architecture cannot be trained
├── PlanError             1   the run does not fit the machine
├── MixedStateError       1   the layers in memory belong to different steps
├── CorruptError          3   a file is damaged
├── IncompatibleError     4   a file is whole, but made for something else
├── NoCheckpointError     5   nothing to resume from
├── LockedError           6   another process owns the run folder
├── StorageError          7   the disk refused a write
│   ├── DiskFullError     7   it has no room left
│   └── ClosedError       7   this process may not read a file; the file may be whole
├── NumericsError         8   a loss, a gradient or a weight is not finite
├── DeviceError           9   the GPU or its driver failed
├── HangError            10   nothing ends any more: a copy, a thread or a disk is stuck
├── InternalError        70   a bug in this program: the one error shown with its traceback
└── Stopped              75   stopped on request; the run can go on later
    └── StoppedUnsaved  130   128 + the signal: the same, and nothing was saved for it
"""

from collections.abc import Sequence


class MegatrainError(Exception):
    """Base of all errors that are shown to the user as one clear line."""

    exit_code = 1


class ConfigError(MegatrainError):
    """The config is wrong. Carries every problem found, each `file:line: key: problem`."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class DataError(MegatrainError):
    """A data file or one of its rows cannot be used; names file, line and reason."""


class RowError(DataError):
    """One row cannot be used. With `data.on_bad_row: skip` it is counted and left out.

    Attributes:
        where: The file and the line or row, `data/train.jsonl:12`.
        reason: What is wrong, without the place.
    """

    def __init__(self, where: str, reason: str) -> None:
        self.where = where
        self.reason = reason
        super().__init__(f"{where}: {reason}")


class ModelError(MegatrainError):
    """A model folder is incomplete, or its architecture is not one that was proved."""


class PlanError(MegatrainError):
    """The run does not fit the machine; carries the missing bytes and what to change."""


class MixedStateError(MegatrainError):
    """The layers in memory do not belong to one step, so there is nothing that could be saved."""


class CorruptError(MegatrainError):
    """A file on disk is damaged."""

    exit_code = 3


class IncompatibleError(MegatrainError):
    """A file on disk is whole, but belongs to another format, model or version."""

    exit_code = 4


class NoCheckpointError(MegatrainError):
    """There is no checkpoint to resume from."""

    exit_code = 5


class LockedError(MegatrainError):
    """Another process is using the run folder."""

    exit_code = 6


class StorageError(MegatrainError):
    """A write to disk failed: full, read-only, or broken."""

    exit_code = 7


class DiskFullError(StorageError):
    """A disk or a quota has no room for what must be written."""


class ClosedError(StorageError):
    """A file cannot be opened by this user or process, which says nothing about the file."""


class NumericsError(MegatrainError):
    """A loss, a gradient or a weight is not finite; says what of the step was applied."""

    exit_code = 8


class DeviceError(MegatrainError):
    """The GPU, its driver or its memory failed."""

    exit_code = 9


class HangError(MegatrainError):
    """Nothing ends any more; the process can only be ended from outside of what hangs."""

    exit_code = 10


class InternalError(MegatrainError):
    """An invariant of this program broke; never the user's fault. Shown with its traceback."""

    exit_code = 70


class Stopped(MegatrainError):  # noqa: N818  not a fault: the user asked for it
    """The run stopped because it was asked to, after a whole step."""

    exit_code = 75


class StoppedUnsaved(Stopped):
    """The run was stopped and nothing new was saved: there was nothing, or no time for it."""

    exit_code = 130

    def __init__(self, message: str, signal_number: int = 2) -> None:
        self.exit_code = 128 + signal_number
        super().__init__(message)
