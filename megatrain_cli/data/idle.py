"""What a source is said to be and its files cannot be: refused, or it would do nothing."""

from pathlib import Path

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
