"""What is said of a run, or asked of it, before it is known that it goes on.

Only reads, and takes no lock.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from megatrain_cli.checkpoint.folder import OpenCheckpoint
from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.checkpoint.hashes import check_files
from megatrain_cli.checkpoint.resolve import is_run
from megatrain_cli.errors import ConfigError, CorruptError
from megatrain_cli.plan.checkpoints import IO_CHUNKS
from megatrain_cli.train.resume import ResumeRequest, decide, finished_text
from megatrain_cli.units import show_bytes


def find_finished(
    request: ResumeRequest, fs: FileSystem, note: Callable[[str], None], refused: dict[Path, str]
) -> str | None:
    """The line to say where the run has ended and nothing asks it to go on; None elsewhere.

    Args:
        request: What was asked.
        fs: What checkpoints are read with.
        note: Hears what a person should know, where the run has ended: of the choice, and that the
            checkpoint is being verified, for that may take a while.
        refused: As in `open_resume`; joined by what is found to be damaged here.

    Raises:
        MegatrainError: As `open_resume`.
    """
    while True:
        choice, config = decide(request, fs, refused)
        with choice.checkpoint as checkpoint:
            said = finished_text(checkpoint.manifest, config)
            if said is None:
                return None
            try:
                verify_finished(checkpoint, request, note)
            except CorruptError as error:
                if not is_run(request.path, fs):
                    raise
                refused[checkpoint.folder] = str(error)
            else:
                for line in (*choice.notes, *config.notes):
                    note(line)
                return said


def verify_finished(
    checkpoint: OpenCheckpoint, request: ResumeRequest, note: Callable[[str], None]
) -> None:
    """Read a checkpoint whose run has ended: nothing else would before it is called so.

    Raises:
        CorruptError: It is not what was saved.
        ConfigError: A fork of it is asked for, which would have nothing to do.
    """
    files = checkpoint.manifest.files
    size = show_bytes(checkpoint.manifest.bytes_total)
    note(f"verifying {checkpoint.folder}: {size}, every byte")
    problems = check_files(checkpoint, (file.file for file in files), IO_CHUNKS)
    if problems:
        raise problems[0]
    if request.fork is not None:
        step = checkpoint.manifest.step
        raise ConfigError(
            f"--fork {request.fork}: {request.path} finished at step {step}, so a fork has nothing "
            f"to do. Add `--steps M` with M above {step}, or name an earlier checkpoint."
        )


def find_device(
    request: ResumeRequest, fs: FileSystem, refused: Mapping[Path, str] | None = None
) -> str:
    """`pipeline.device` of the run as it would go on.

    Raises:
        MegatrainError: As `open_resume`.
    """
    choice, config = decide(request, fs, refused)
    with choice.checkpoint:
        return config.loaded.config.pipeline.device
