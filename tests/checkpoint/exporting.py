"""What tests of exporting share: an export with the usual arguments, and one that is refused."""

from pathlib import Path

import pytest
import torch

from megatrain_cli.checkpoint.export import Exported, export
from megatrain_cli.checkpoint.folder import open_checkpoint
from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.checkpoint.reread import check_written
from megatrain_cli.errors import MegatrainError


def run_export(
    checkpoint: Path,
    target: Path,
    *,
    dtype: str | None = None,
    max_file_bytes: int = 5 * 10**9,
    fs: FileSystem | None = None,
) -> Exported:
    with open_checkpoint(checkpoint, FileSystem()) as held:
        return export(
            held,
            target,
            fs or FileSystem(),
            dtype=dtype,
            max_file_bytes=max_file_bytes,
            card=lambda kind: f"# {kind}\n",
            reread=check_written,
            threads=2,
        )


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(
        one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    )


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def refused(kind: type[MegatrainError], words: str, tmp_path: Path, **kw: object) -> None:
    before = left(tmp_path)
    with pytest.raises(kind, match=words):
        run_export(tmp_path / "x", tmp_path / "out", **kw)  # type: ignore[arg-type]
    assert left(tmp_path) == before
