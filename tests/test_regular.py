"""Files are read, and what only has a file's name is refused at once, wherever a user names it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megatrain_cli.checkpoint.headers import read_header
from megatrain_cli.config.load import load_config
from megatrain_cli.data.content import hash_content
from megatrain_cli.data.files import find_kind, is_packed
from megatrain_cli.data.registry import read_entry
from megatrain_cli.data.source import SourceFile, read_rows
from megatrain_cli.data.template_file import read_template
from megatrain_cli.errors import MegatrainError
from megatrain_cli.plan.machine_file import load_machine_file
from megatrain_cli.regular import open_file, read_file
from megatrain_cli.report.journal import Journal, read_evaluations
from tests.others import OTHERS, make_other

READERS: list[Callable[[Path], object]] = [
    load_config,
    load_machine_file,
    hash_content,
    find_kind,
    is_packed,
    read_template,
    read_header,
    read_evaluations,
    Journal,
    lambda path: read_entry(path, "name"),
    lambda path: list(read_rows(SourceFile(path))),
]


def test_a_file_and_a_link_to_one_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"all of it")
    (tmp_path / "link").symlink_to("file")
    assert read_file(tmp_path / "file") == read_file(tmp_path / "link") == b"all of it"


def test_a_folder_and_what_is_not_there_are_told_as_open_tells_them(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        open_file(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_file(tmp_path / "none")


@pytest.mark.parametrize("kind", OTHERS)
def test_anything_else_is_named(kind: str, tmp_path: Path) -> None:
    make_other(kind, tmp_path / "it")
    with pytest.raises(OSError, match=f"it is a {kind}, not a file"):
        read_file(tmp_path / "it")


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("read", READERS)
def test_no_reader_of_what_a_user_names_waits_for_it(
    read: Callable[[Path], object], kind: str, tmp_path: Path
) -> None:
    make_other(kind, tmp_path / "it.jsonl")
    with pytest.raises(MegatrainError, match=f"it is a {kind}, not a file"):
        read(tmp_path / "it.jsonl")
