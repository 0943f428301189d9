"""From what a config says of its sources to what is read."""

from collections.abc import Sequence
from pathlib import Path

from megatrain_cli.config.paths import is_hub_id, split_entry
from megatrain_cli.config.schema import DataSection, DataSource
from megatrain_cli.data.formats import Reading
from megatrain_cli.data.hub import HubSet
from megatrain_cli.data.registry import read_entry
from megatrain_cli.data.source import SourceFile


def find_sources(
    data: DataSection, given: Sequence[DataSource] | None = None
) -> tuple[SourceFile, ...]:
    """The sources of a config, in its order. Registries are read; data files are not.

    Args:
        data: The section.
        given: Some of its sources; None are those to train on.

    Raises:
        DataError: A registry cannot be read, or an entry of it cannot be used.
    """
    wanted = data.train if given is None else given
    return tuple(_source(one, index, data.format) for index, one in enumerate(wanted))


def _source(given: DataSource, index: int, data_format: str) -> SourceFile:
    weight = 1.0 if given.weight is None else given.weight
    path, name = split_entry(Path(given.path))
    if name is not None:
        entry = read_entry(path, name)
        limits = [rows for rows in (entry.max_rows, given.max_rows) if rows is not None]
        return SourceFile(
            path=entry.path,
            format=entry.format,
            reading=entry.reading,
            max_rows=min(limits, default=None),
            hub=entry.hub,
            index=index,
            weight=weight,
        )
    hub = None
    if is_hub_id(path) and not path.exists():
        hub = HubSet(
            str(path),
            given.subset,
            given.split or "train",
            given.revision,
            given.streaming or False,
        )
    return SourceFile(
        path=path,
        format=given.format or data_format,
        reading=Reading(given.columns or {}, given.tags or {}),
        max_rows=given.max_rows,
        sample_by=given.sample_by,
        hub=hub,
        index=index,
        weight=weight,
    )
