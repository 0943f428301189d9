"""Look at a checkpoint without using it: what it is, and everything that is wrong with it."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from megatrain_cli.checkpoint.elements import FLOATS
from megatrain_cli.checkpoint.folder import OpenCheckpoint, open_checkpoint, read_manifest
from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.checkpoint.hashes import check_files
from megatrain_cli.checkpoint.manifest import Manifest
from megatrain_cli.checkpoint.numerics import TensorNumbers, measure
from megatrain_cli.checkpoint.places import short
from megatrain_cli.checkpoint.summary import ShardGroup, facts_in_words, shard_groups
from megatrain_cli.checkpoint.verify import check_header
from megatrain_cli.errors import (
    CorruptError,
    IncompatibleError,
    MegatrainError,
    NoCheckpointError,
    NumericsError,
)

Check = Callable[[OpenCheckpoint], Iterable[MegatrainError]]
"""Looks at an open checkpoint and yields what is wrong with it."""

_REFUSALS = (CorruptError, IncompatibleError, NoCheckpointError)
# What a reader has to know first; the exit code is that of the first kind found.
_GRAVEST_FIRST = (CorruptError, IncompatibleError, NoCheckpointError, NumericsError)


@dataclass(frozen=True)
class Inspection:
    """What was found.

    Attributes:
        manifest: None if it could not be read.
        problems: What is wrong, one line each; empty if all that was looked at is good.
        notes: What is odd and harmless.
        checked: What was looked at, in words.
        numbers: What `--numerics` measured.
    """

    folder: Path
    manifest: Manifest | None
    problems: tuple[MegatrainError, ...]
    notes: tuple[str, ...] = ()
    checked: tuple[str, ...] = ()
    numbers: tuple[TensorNumbers, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 if good, else that of the gravest problem."""
        found = {type(problem) for problem in self.problems}
        return next((kind.exit_code for kind in _GRAVEST_FIRST if kind in found), 0)

    @property
    def status(self) -> str:
        """In a word or two."""
        return {0: "good", 3: "damaged", 4: "incompatible", 5: "incomplete", 8: "bad numbers"}[
            self.exit_code
        ]

    @cached_property
    def summary(self) -> tuple[tuple[str, str], ...]:
        """What is known of the checkpoint, as label and text."""
        facts = facts_in_words(self.manifest) if self.manifest else ()
        checked = ", ".join(self.checked) or "nothing"
        state = ("status", f"{self.status} (checked: {checked})")
        return (("checkpoint", str(self.folder)), state, *facts)

    @cached_property
    def groups(self) -> tuple[ShardGroup, ...]:
        """The shards, neighbours of one form together."""
        return shard_groups(self.manifest) if self.manifest else ()

    def to_json(self) -> dict[str, object]:
        """As JSON values."""
        return {
            "folder": str(self.folder),
            "kind": "checkpoint",
            "status": self.status,
            "exit_code": self.exit_code,
            "checked": list(self.checked),
            "problems": [str(problem) for problem in self.problems],
            "notes": list(self.notes),
            "id": self.manifest.id if self.manifest else None,
            "manifest": self.manifest.model_dump(mode="json") if self.manifest else None,
            "numerics": [numbers.to_json() for numbers in self.numbers],
        }


def inspect_checkpoint(
    folder: Path,
    fs: FileSystem,
    *,
    full: bool = False,
    numerics: bool = False,
    more: Sequence[tuple[str, Check]] = (),
    threads: int = 1,
) -> Inspection:
    """Look at one checkpoint. Nothing is raised for what is wrong with it.

    Args:
        folder: Of the checkpoint.
        fs: What it is read with.
        full: Also hash every byte.
        numerics: Also look at every value.
        more: Other checks, each with what it looks at in words.
        threads: That read at once.

    Raises:
        StorageError: A file cannot be opened for a reason outside of it.
    """
    try:
        manifest = read_manifest(folder, fs)
    except _REFUSALS as error:
        return Inspection(folder, None, (error,), checked=("manifest",))
    try:
        checkpoint = open_checkpoint(folder, fs)
    except _REFUSALS as error:
        return Inspection(folder, manifest, (error,), checked=("manifest", "files"))
    with checkpoint:
        checks: list[tuple[str, Check]] = [
            ("headers", _check_headers),
            ("dtypes", lambda held: check_dtypes(held.manifest, held.folder)),
        ]
        if full:
            names = [entry.file for entry in checkpoint.manifest.files]
            checks = [*checks[1:], ("every byte", lambda held: check_files(held, names, threads))]
        found = Inspection(
            folder,
            checkpoint.manifest,
            tuple(problem for _, check in (*checks, *more) for problem in check(checkpoint)),
            checkpoint.notes,
            ("manifest", "files", "index", *(name for name, _ in (*checks, *more))),
        )
        return _with_numbers(found, checkpoint, threads) if numerics else found


def check_dtypes(manifest: Manifest, folder: Path) -> Iterator[IncompatibleError]:
    """Tensors that are not stored the way the manifest says they are kept."""
    kinds = manifest.dtypes
    said = {key: kind for key, kind in kinds.items() if kind in FLOATS}
    wanted = {"weights": said.get("weights"), "grads": said.get("weights")}
    optim = {key: said.get(key) for key in ("exp_avg", "exp_avg_sq")}
    optim |= {"master_lo": "I16", "master": "F32"}
    for part in manifest.parts:
        for place in part.tensors:
            kind = place.name.partition(".")[0]
            due = optim.get(kind) if part.part == "optim" else wanted[part.part]
            if place.dtype != due:
                yield IncompatibleError(
                    f"{folder / part.file}: {short(place.name)} is {place.dtype}, and such a "
                    f"tensor is kept as {due or 'nothing known'}."
                )


def _check_headers(checkpoint: OpenCheckpoint) -> Iterator[CorruptError]:
    for part in checkpoint.manifest.parts:
        what = f"{checkpoint.folder / part.file}"
        try:
            check_header(part, checkpoint.read_bytes(part.file, 0, part.data_start), what)
        except CorruptError as error:
            yield error


def _with_numbers(found: Inspection, checkpoint: OpenCheckpoint, threads: int) -> Inspection:
    try:
        numbers = measure(checkpoint, threads)
    except CorruptError as error:
        return dataclasses.replace(found, problems=(*found.problems, error))
    faults = tuple(
        NumericsError(f"{short(one.name)}: {fault}.") for one in numbers for fault in one.faults
    )
    return dataclasses.replace(
        found,
        problems=(*found.problems, *faults),
        checked=(*found.checked, "every value"),
        numbers=numbers,
    )
