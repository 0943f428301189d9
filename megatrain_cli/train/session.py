"""`train` and `resume`: from a config, or a checkpoint, to a run's last checkpoint."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.checkpoint.resolve import is_run
from megatrain_cli.config.load import LoadedConfig, check_paths
from megatrain_cli.errors import CorruptError
from megatrain_cli.report.console import RunConsole
from megatrain_cli.train.assemble import ORDINARY_MEMORY
from megatrain_cli.train.attempt import Attempt
from megatrain_cli.train.folder import RunFolder
from megatrain_cli.train.not_loaded import DamagedCheckpoint, LockRefused
from megatrain_cli.train.outlook import verify_finished
from megatrain_cli.train.resume import ResumeRequest, open_resume


def train(loaded: LoadedConfig, console: RunConsole) -> None:
    """Train from the first step to the last; checkpoints are written on the way and at the end.

    Raises:
        Stopped: A signal asked for it; the step was finished and saved.
        MegatrainError: Something is wrong or has failed; what could be saved is.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(RunFolder(Path(loaded.config.train.output_dir)))
        for note in folder.notes:
            console.note(note)
        Attempt(loaded, loaded.config, folder, console, stack).run()


def resume(
    request: ResumeRequest, console: RunConsole, refused: Mapping[Path, str] | None = None
) -> None:
    """Go on where a run stopped; a run that has ended says so.

    The tensors of a checkpoint are checked while they are loaded. Where a run was named and its
    newest checkpoint is found to be damaged then, nothing has changed yet, and the one before it is
    taken.

    Args:
        request: What was asked.
        console: Hears what a person should know.
        refused: Checkpoints that are known to be damaged, and why.

    Raises:
        CorruptError: The checkpoint that was named, or every one of the run, is damaged.
        MegatrainError: As `train`, and as `open_resume`.
    """
    fs = FileSystem()
    known = dict(refused or {})
    pageable = False
    while True:
        try:
            with ExitStack() as stack:
                resumption = open_resume(request, fs, stack, known)
                if resumption.finished is None:
                    console.note(f"going on from {resumption.checkpoint.folder}")
                for note in resumption.notes:
                    console.note(note)
                if resumption.finished is not None:
                    try:
                        verify_finished(resumption.checkpoint, request, console.note)
                    except CorruptError as error:
                        raise DamagedCheckpoint(resumption.checkpoint.folder, error) from error
                    console.note(f"{request.path}: {resumption.finished}")
                    return
                loaded, recorded = resumption.config.loaded, resumption.config.recorded
                check_paths(loaded, resumed=True)
                if pageable:
                    loaded = _in_ordinary_memory(loaded)
                Attempt(
                    loaded,
                    recorded,
                    resumption.folder,
                    console,
                    stack,
                    resumption=resumption,
                    force=request.force,
                ).run()
                return
        except DamagedCheckpoint as damaged:
            if not is_run(request.path, fs):
                raise damaged.reason from None
            known[damaged.folder] = str(damaged.reason)
        except LockRefused as error:
            console.note(f"{error} {ORDINARY_MEMORY}")
            pageable = True


def _in_ordinary_memory(loaded: LoadedConfig) -> LoadedConfig:
    store = loaded.config.store.model_copy(update={"memory": "pageable"})
    return replace(loaded, config=loaded.config.model_copy(update={"store": store}))
