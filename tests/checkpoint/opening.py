"""What tests of opening share: the real file system, and a refusal that leaves nothing open."""

from pathlib import Path

import pytest

from megatrain_cli.checkpoint.folder import open_checkpoint
from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.errors import MegatrainError

WEIGHTS = "model-embed.safetensors"
OPTIM = "training/optim-embed.safetensors"
FS = FileSystem()


def open_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def refused(folder: Path, error: type[MegatrainError], match: str) -> None:
    before = open_fds()
    with pytest.raises(error, match=match) as caught:
        open_checkpoint(folder, FS)
    assert str(folder) in str(caught.value)
    assert str(caught.value).isprintable()
    assert open_fds() == before
