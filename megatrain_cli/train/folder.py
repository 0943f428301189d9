"""The run folder: one run, one writer."""

import fcntl
import os
import socket
from pathlib import Path
from types import TracebackType
from typing import Self

from megatrain_cli.errors import ConfigError, LockedError, StorageError


class RunFolder:
    """`RUN/` with `config.yaml`, `metrics.jsonl`, `run.lock` and `checkpoints/`.

    The lock is the kernel's (`flock`): it ends with the process that holds it, however that ends.

    Raises:
        ConfigError: The folder holds another run.
        LockedError: Another process is running there.
        StorageError: It cannot be made or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = (path / "run.lock").open("a+")
        except OSError as error:
            raise StorageError(f"{path} cannot be written: {error.strerror or error}.") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.seek(0)
            owner = self._lock.read().strip() or "another process"
            self._lock.close()
            raise LockedError(
                f"{path} is in use by {owner}. Wait for it, or set another `train.output_dir`."
            ) from None
        if self._holds_a_run():
            self._lock.close()
            raise ConfigError(
                f"train.output_dir: {path} holds a run already. Set another folder "
                f"(`train.output_dir=...`), or remove it; nothing in it was changed."
            )
        self._lock.truncate(0)
        self._lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        self._lock.flush()

    def _holds_a_run(self) -> bool:
        """Steps or weights of an earlier run; a run that ended before its first step left none."""
        if self.metrics.exists() and self.metrics.stat().st_size:
            return True
        checkpoints = self.path / "checkpoints"
        return checkpoints.is_dir() and any(checkpoints.iterdir())

    def write_config(self, text: str) -> None:
        """Write the config as it was resolved.

        Raises:
            StorageError: The disk refused it.
        """
        path = self.path / "config.yaml"
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise StorageError(f"{path} cannot be written: {error.strerror or error}.") from error

    @property
    def metrics(self) -> Path:
        """The journal: one object a step."""
        return self.path / "metrics.jsonl"

    def checkpoint(self, step: int) -> Path:
        """Where the weights after `step` optimizer steps go."""
        return self.path / "checkpoints" / f"step-{step:08d}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.close()
