"""Files that are read more than once, told by content: their rows count as often.

Somebody may mean it, as a weight. But two spellings of a path, a link, a copy, or a folder and a
file in it look like different data, and nothing else would tell.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from megatrain_cli.data.files import show_path
from megatrain_cli.data.prepare import Prepared
from megatrain_cli.data.source import SourceFile
from megatrain_cli.units import show_number

# Files that a person is told of, and names of each.
_SHOWN = 3


@dataclass(frozen=True)
class ReadFile:
    """A file, or a data set of a hub, each time that it is read.

    Attributes:
        content: Equal where the rows are.
        name: As a user would write it.
        num_rows: That are used of it.
    """

    content: tuple[str | None, ...]
    name: str
    num_rows: int


def read_files(sources: Sequence[SourceFile], prepared: Prepared) -> list[ReadFile]:
    """All that was read, in order."""
    assert prepared.examples.files is not None  # prepared rows have them
    found: list[ReadFile] = []
    first = 0
    for source, contents, count in zip(
        sources, prepared.contents, prepared.summary.used_by_source, strict=True
    ):
        if (hub := source.hub) is not None:
            key = (hub.path, hub.subset, hub.split, hub.revision)
            found.append(ReadFile(key, hub.shown, count))
        else:
            files = prepared.examples.files[first : first + count]
            rows = np.bincount(files, minlength=len(contents)).tolist()
            found += [
                ReadFile((file.xxh3_128,), show_path(file.path), num_rows)
                for file, num_rows in zip(contents, rows, strict=True)
            ]
        first += count
    return found


def repeated(files: Sequence[ReadFile], key: str, advice: str) -> list[str]:
    """A line for each that is read more than once; the last may stand for more.

    Args:
        files: All of a key.
        key: Names it.
        advice: Follows each line.
    """
    by_content: dict[tuple[str | None, ...], list[ReadFile]] = {}
    for file in files:
        by_content.setdefault(file.content, []).append(file)
    more = [group for group in by_content.values() if len(group) > 1]
    lines = [
        f"{_names(group)} read {len(group)} times for {key}, which makes "
        f"{show_number(sum(file.num_rows for file in group), 'row')}. {advice}"
        for group in islice(more, _SHOWN)
    ]
    if len(more) > _SHOWN:
        rows = sum(file.num_rows for group in more for file in group)
        lines.append(
            f"so {'is' if len(more) == _SHOWN + 1 else 'are'} "
            f"{show_number(len(more) - _SHOWN, 'more file')}; all of these make "
            f"{show_number(rows, 'row')}"
        )
    return lines


def trained_on(
    evaluated: Sequence[ReadFile], trained: Collection[tuple[str | None, ...]]
) -> list[str]:
    """A line for each that is evaluated on and trained on.

    Args:
        evaluated: Of `data.eval`.
        trained: What the files of `data.train` hold.
    """
    total = sum(file.num_rows for file in evaluated)
    return [
        f"{file.name} is a file of data.train too: {file.num_rows} of "
        f"{show_number(total, 'row')} are trained on, so their loss says nothing of others"
        for file in evaluated
        if file.content in trained
    ]


def _names(group: Sequence[ReadFile]) -> str:
    names = list(dict.fromkeys(file.name for file in group))
    if len(names) == 1:
        return f"{names[0]} is"
    more = f" and {show_number(len(names) - _SHOWN, 'other')}" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more} hold the same bytes, which are"
