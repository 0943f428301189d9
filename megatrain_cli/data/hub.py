"""Rows of a data set on a hub, through the `datasets` library; a row's place is its number.

The library is asked for rows, not for files: whatever it reads (Parquet, JSON, its own folders)
comes as the same columns.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatrain_cli.data.records import Records, as_record
from megatrain_cli.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True)
class HubSet:
    """One split of a data set.

    Attributes:
        path: The id on the hub, `owner/name`.
        subset: Name of its configuration; None where it has only one.
        revision: Commit, branch or tag; None takes what is newest.
        streaming: Whether rows are read over the network as they are used, and none is kept.
    """

    path: str
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    streaming: bool = False

    @property
    def shown(self) -> str:
        """The id with its split, for messages."""
        return f"{self.path}[{self.split}]"


def read_hub(data_set: HubSet) -> Records:
    """The rows of a split, in order.

    Raises:
        DataError: `datasets` is not installed, or cannot load it; gives its reason.
    """
    name = data_set.shown
    try:
        import datasets  # noqa: PLC0415
    except ImportError:
        raise DataError(
            f"{name}: there is no such file or folder here, and reading from a hub needs the "
            "library datasets. Correct the path, or install it with "
            "`pip install 'megatrain[hub]'`."
        ) from None
    try:
        rows: Iterable[object] = datasets.load_dataset(
            data_set.path,
            name=data_set.subset,
            split=data_set.split,
            revision=data_set.revision,
            streaming=data_set.streaming,
        )
        for number, value in enumerate(rows, start=1):
            yield as_record(f"{name}:{number}", value)
    # What it raises for a name, a split, a network or a file that is not there.
    except (OSError, ValueError, LookupError, RuntimeError, datasets.exceptions.DatasetsError) as e:
        reason = str(e).partition("\n")[0]
        raise DataError(
            f"{name}: there is no such file or folder here, and the data set cannot be loaded: "
            f"{reason}"
        ) from None
