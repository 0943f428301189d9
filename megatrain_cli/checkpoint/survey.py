"""All checkpoints of a run at a glance: what each is worth, and which one `resume` would take."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.checkpoint.inspect import Inspection, inspect_checkpoint
from megatrain_cli.checkpoint.names import CHECKPOINTS, TEMPORARY, TRAINING, TRASH
from megatrain_cli.checkpoint.places import short
from megatrain_cli.checkpoint.resolve import candidates
from megatrain_cli.checkpoint.summary import short_id
from megatrain_cli.errors import CorruptError, IncompatibleError, NoCheckpointError
from megatrain_cli.units import show_bytes

_WEIGHTS_ONLY = "weights only"


@dataclass(frozen=True)
class SurveyRow:
    """One folder that may be a checkpoint.

    Attributes:
        name: Of the folder.
        status: `good`, or what it is instead, in a word or two.
        problem: Why one cannot resume from it; None if one can.
        inspection: The quick look at it.
        is_picked: Whether `resume RUN` would take it.
    """

    name: str
    status: str
    problem: str | None
    inspection: Inspection
    is_picked: bool

    @property
    def folder(self) -> Path:
        """Where it is."""
        return self.inspection.folder

    @property
    def facts(self) -> tuple[str, ...]:
        """Attempt, size and the beginning of the id; empty without a manifest."""
        manifest = self.inspection.manifest
        if manifest is None:
            return ()
        return str(manifest.attempt), show_bytes(manifest.bytes_total), short_id(manifest.id)

    def to_json(self) -> dict[str, object]:
        """As JSON values."""
        manifest = self.inspection.manifest
        return {
            "name": self.name,
            "status": self.status,
            "problem": self.problem,
            "step": manifest.step if manifest else None,
            "attempt": manifest.attempt if manifest else None,
            "bytes": manifest.bytes_total if manifest else None,
            "id": manifest.id if manifest else None,
        }


@dataclass(frozen=True)
class Survey:
    """What a run's folder of checkpoints holds.

    Attributes:
        rows: Newest first.
        notes: What lies there beside them.
    """

    run: Path
    rows: tuple[SurveyRow, ...]
    notes: tuple[str, ...]

    @cached_property
    def picked(self) -> SurveyRow | None:
        """The one that `resume RUN` would take."""
        return next((row for row in self.rows if row.is_picked), None)

    @property
    def advice(self) -> str:
        """What else to do where there is nothing to resume from; may be empty."""
        model = next((row for row in self.rows if row.status == _WEIGHTS_ONLY), None)
        if model is None:
            return ""
        return f". To train on from weights, run `megatrain train` with model.path={model.folder}"

    @property
    def exit_code(self) -> int:
        """5 if there is nothing to resume from, 3 or 4 if any is damaged or incompatible, else 0.

        Folders that were never finished do not count: a run that is killed leaves such.
        """
        if self.picked is None:
            return NoCheckpointError.exit_code
        found = {row.inspection.exit_code for row in self.rows}
        if any(row.problem and not row.inspection.exit_code for row in self.rows):
            found.add(IncompatibleError.exit_code)  # whole, but not of this run
        wanted = (CorruptError.exit_code, IncompatibleError.exit_code)
        return next((code for code in wanted if code in found), 0)


def survey(run: Path, fs: FileSystem) -> Survey:
    """Look quickly at every checkpoint of a run.

    Raises:
        StorageError: The folder of checkpoints cannot be read.
    """
    rows: list[SurveyRow] = []
    picked = False
    for one in candidates(run, fs):
        found = inspect_checkpoint(one.folder, fs)
        problem = one.problem or next(map(str, found.problems), None)
        status = found.status
        if problem and not found.problems:
            status = "not of this run"
        elif found.exit_code == NoCheckpointError.exit_code and _is_model(one.folder, fs):
            status = _WEIGHTS_ONLY
        takes = problem is None and not picked
        picked = picked or takes
        rows.append(SurveyRow(one.folder.name, status, problem, found, takes))
    return Survey(run, tuple(rows), _leftovers(run, fs))


def _is_model(folder: Path, fs: FileSystem) -> bool:
    return fs.exists(folder / "config.json") and not fs.exists(folder / TRAINING)


def _leftovers(run: Path, fs: FileSystem) -> tuple[str, ...]:
    try:
        names = fs.list_folder(run / CHECKPOINTS)
    except (FileNotFoundError, NotADirectoryError):  # no run after all: there are no rows either
        return ()
    unfinished = [name for name in names if name.startswith(TEMPORARY)]
    retired = [name for name in names if name.startswith(TRASH)]
    said = [f"{short(name)} was never finished" for name in unfinished]
    said += [f"{short(name)} was being removed" for name in retired]
    return tuple(f"{line}; the run removes it when it next starts." for line in said)
