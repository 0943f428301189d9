"""The text of a chat template that a user keeps in a file."""

from io import TextIOWrapper
from pathlib import Path

from megatrain_cli.errors import DataError
from megatrain_cli.regular import open_file


def read_template(path: Path) -> str:
    """The text of a template's file.

    Raises:
        DataError: It cannot be read, is not UTF-8, or is empty.
    """
    try:
        with TextIOWrapper(open_file(path), encoding="utf-8-sig") as file:
            text = file.read()
    except OSError as error:
        raise DataError(
            f"{path}: the chat template cannot be read: {error.strerror or error}"
        ) from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: the chat template is not UTF-8: byte {error.start} cannot be read"
        ) from None
    if not text.strip():
        raise DataError(f"{path}: the chat template is empty")
    return text
