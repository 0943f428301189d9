"""Which run a folder holds, and how often it was started: `run.json` and `attempts.jsonl`.

Neither asks a clock: an attempt is one more than any that left a trace, in the file or in a
checkpoint.
"""

import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from megatrain_cli import __version__
from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.errors import CorruptError, IncompatibleError, StorageError
from megatrain_cli.regular import read_file
from megatrain_cli.train.durable import replace_file

IDENTITY_NAME = "run.json"
ATTEMPTS_NAME = "attempts.jsonl"
FORMAT = 1


@dataclass(frozen=True)
class Origin:
    """Where a forked run comes from: the run, the checkpoint's id, and its step."""

    run_id: str
    checkpoint: str
    step: int


@dataclass(frozen=True)
class RunIdentity:
    """Written once; a run keeps it wherever its folder is moved.

    Attributes:
        run_id: Of a new run 32 hexadecimal digits, drawn at random.
        megatrain: The version that began the run.
        parent: Of a forked run.
        format: Of this file.
    """

    run_id: str
    megatrain: str = __version__
    parent: Origin | None = None
    format: int = FORMAT


def new_identity(parent: Origin | None = None) -> RunIdentity:
    """Of a run that begins now."""
    return RunIdentity(uuid.uuid4().hex, parent=parent)


def write_identity(fs: FileSystem, run: Path, identity: RunIdentity) -> None:
    """Write `run.json`, whole or not at all.

    Raises:
        StorageError: The disk refused.
    """
    text = json.dumps(asdict(identity), indent=2, sort_keys=True) + "\n"
    replace_file(fs, run / IDENTITY_NAME, text.encode())


def read_identity(run: Path) -> RunIdentity | None:
    """Read `run.json`; None if there is none, as in a folder that only its checkpoints came to.

    Raises:
        CorruptError: It is no identity.
        IncompatibleError: It is one of a later format.
        StorageError: It cannot be read.
    """
    path = run / IDENTITY_NAME
    try:
        values = json.loads(read_file(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{path} is no JSON: {error}. {_WITHOUT}") from error
    if not isinstance(values, dict) or not isinstance(values.get("format"), int):
        raise CorruptError(f"{path} is not the identity of a run. {_WITHOUT}")
    if values["format"] != FORMAT:
        raise IncompatibleError(
            f"{path} has format {values['format']} and this version reads {FORMAT}. Install a "
            "newer version of megatrain."
        )
    run_id, version = values.get("run_id"), values.get("megatrain")
    if not isinstance(run_id, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", run_id):
        raise CorruptError(f"{path} names no run. {_WITHOUT}")
    if not isinstance(version, str):
        raise CorruptError(f"{path} names no version. {_WITHOUT}")
    return RunIdentity(run_id, version, _origin(values.get("parent"), path))


def count_attempt(
    fs: FileSystem, run: Path, run_id: str, seen: int, start: Mapping[str, object]
) -> int:
    """Note that a run was started, durably, before it does anything else.

    Args:
        fs: Where.
        run: Its folder; its lock is held.
        run_id: Attempts of other runs in the file do not count.
        seen: The highest attempt that any checkpoint names; 0 without one.
        start: What else the line says, for people.

    Returns:
        The attempt's number, from 1, higher than all before.

    Raises:
        StorageError: The disk refused.
    """
    path = run / ATTEMPTS_NAME
    try:
        raw = read_file(path) if path.exists() else b""
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}.") from error
    attempt = 1 + max([seen, *(_attempt_of(line, run_id) for line in raw.splitlines())])
    line = json.dumps({"attempt": attempt, "run_id": run_id, "megatrain": __version__, **start})
    whole = raw[: raw.rfind(b"\n") + 1]
    replace_file(fs, path, whole + line.encode() + b"\n")
    return attempt


def names_checkpoint(run: Path) -> bool:
    """Whether an attempt of the folder's went on from a checkpoint.

    Raises:
        OSError: The file cannot be read.
    """
    path = run / ATTEMPTS_NAME
    raw = read_file(path) if path.exists() else b""
    return any("checkpoint" in _values_of(line) for line in raw.splitlines())


_WITHOUT = "Remove it to resume with what the checkpoints say."


def _origin(value: object, path: Path) -> Origin | None:
    if value is None:
        return None
    try:
        assert isinstance(value, dict)
        return Origin(str(value["run_id"]), str(value["checkpoint"]), int(value["step"]))
    except (AssertionError, KeyError, TypeError, ValueError) as error:
        raise CorruptError(f"{path} names no parent that can be read. {_WITHOUT}") from error


def _attempt_of(line: bytes, run_id: str) -> int:
    """The attempt that a line counts; 0 where it is none of this run's."""
    values = _values_of(line)
    attempt = values.get("attempt")
    return attempt if isinstance(attempt, int) and values.get("run_id") == run_id else 0


def _values_of(line: bytes) -> dict[str, object]:
    """What a line says; empty where it cannot be read."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}
