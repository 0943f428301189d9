"""What is said of a source and would do nothing: refused, or told where it is of no harm."""

from collections.abc import Collection
from pathlib import Path

from megatrain_cli.data.chats import new_names
from megatrain_cli.data.files import Kind, show_path
from megatrain_cli.data.formats import FIELDS, Reading
from megatrain_cli.errors import DataError

_NAMES: dict[Kind, str] = {"json": "JSON", "csv": "CSV", "parquet": "Parquet", "arrow": "Arrow"}
_WITH_TURNS = {"sharegpt", "messages", "prompt_completion"}


def refuse_sampling(path: Path, kind: Kind, sample_by: str | None) -> None:
    """Refuse `sample_by` of a file whose rows are no lines.

    Raises:
        DataError: It is set, and the file is no plain text.
    """
    if sample_by is not None and kind != "text":
        raise DataError(
            f"{show_path(path)}: `sample_by` of the source is for plain text, whose files end in "
            f".txt, and this is {_NAMES[kind]}. Remove the key, or name a .txt file."
        )


def refuse_names(name: str, row_format: str, reading: Reading) -> None:
    """Refuse names for columns and roles that rows of a format do not have.

    Args:
        name: Of the source.
        row_format: Of its rows.
        reading: What was said of it.

    Raises:
        DataError: A name would be read of no row.
    """
    fields = FIELDS[row_format]
    for ours, column in reading.columns.items():
        is_read = row_format in _WITH_TURNS if "." in ours else ours in fields
        if column and column != ours and not is_read:
            raise DataError(
                f"{name}: `columns` of the source names `{column}` for {ours}, which is not read "
                f"of rows of format {row_format}. Leave it out; read are {', '.join(fields)}."
            )
    if reading.tags and row_format not in _WITH_TURNS:
        raise DataError(
            f"{name}: `tags` of the source names roles, and rows of format {row_format} have no "
            "turns. Remove the key."
        )


def idle_tags(
    name: str, row_format: str | None, reading: Reading, roles: Collection[str]
) -> list[str]:
    """What to say of names for roles that no turn has.

    No refusal: many entries of registries name every role that there is.

    Args:
        name: Of the source.
        row_format: Of its rows; None where none could be read.
        reading: What was said of it.
        roles: Of all turns that were read, as the file names them.
    """
    named = {} if row_format is None else new_names(row_format, reading.tags)
    idle = [f"`{tag}` for {ours}" for tag, ours in named.items() if tag not in roles]
    if not idle:
        return []
    one = len(idle) == 1
    end = "that role, so it has no effect" if one else "these roles, so they have no effect"
    return [
        f"{name}: `tags` of the source names {', '.join(idle)}: no turn that was read has {end}"
    ]
