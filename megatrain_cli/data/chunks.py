"""Rows in chunks: read in one place, tokenised anywhere, and put together in their order."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megatrain_cli.data.files import show_path
from megatrain_cli.data.formats import Row
from megatrain_cli.data.source import SourceFile, parse_rows
from megatrain_cli.data.template import IGNORED, Encoded, Overlong, SkipReason, encode_rows
from megatrain_cli.errors import DataError, RowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHUNK_ROWS = 128

Look = Callable[[Row, Encoded], None]
"""Sees rows with what became of them, in their order; may refuse them with a `DataError`."""


@dataclass(frozen=True)
class Encoding:
    """What decides which tokens a row becomes, beside its tokenizer; see `encode_row`."""

    max_length: int
    overlong: Overlong
    train_on_prompt: bool


@dataclass(frozen=True)
class Fault:
    """An error on its way between processes, where exceptions lose their parts."""

    message: str
    where: str | None = None

    @classmethod
    def of(cls, error: DataError) -> "Fault":
        """Take an error apart."""
        if isinstance(error, RowError):
            return cls(error.reason, error.where)
        return cls(str(error))

    def error(self) -> DataError:
        """The error again."""
        return DataError(self.message) if self.where is None else RowError(self.where, self.message)


@dataclass(frozen=True)
class Chunk:
    """Rows of one source that follow each other.

    Attributes:
        source: The place of the source among all.
        items: Rows, and what is wrong with those that could not be read.
        files: Of each item, the number of its file within the source; 0 for a hub's.
        first: The source's first chunk.
        last: No more rows of this source follow.
    """

    source: int
    items: Sequence[Row | Fault]
    files: Sequence[int]
    first: bool
    last: bool


@dataclass(frozen=True)
class EncodedChunk:
    """What became of a chunk's rows.

    Attributes:
        source: As the chunk's.
        last: As the chunk's.
        format: Of the rows; None where there are none.
        num_read: Rows, bad ones included.
        num_used: Rows with something to learn; `num_split` of them became several examples.
        num_cut: Examples that were longer than `max_length`.
        longest: Tokens of the longest example, before cutting.
        tokens: `(num_tokens,)` int32, all examples one behind the other.
        is_target: `(num_tokens,)` bool.
        lengths: `(num_examples,)` int64.
        files: `(num_examples,)` int32: the number of the file, within the source.
        lines: `(num_examples,)` int64: the line, or the row, of the file that each came from.
        skipped: Why and where rows were left out.
        faults: Rows that cannot be used, each with how many of the chunk were read by then.
    """

    source: int
    last: bool
    format: str | None
    num_read: int
    num_used: int
    num_split: int
    num_cut: int
    longest: int
    tokens: NDArray[np.int32]
    is_target: NDArray[np.bool_]
    lengths: NDArray[np.int64]
    files: NDArray[np.int32]
    lines: NDArray[np.int64]
    skipped: tuple[tuple[SkipReason, str], ...]
    faults: tuple[tuple[int, Fault], ...]


def read_chunks(
    sources: Sequence[SourceFile],
    size: int = CHUNK_ROWS,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[Chunk]:
    """All rows of all sources, in order. Every source ends with a chunk, maybe of no rows.

    Args:
        sources: What to read.
        size: Rows of a chunk.
        say: Told behind each source what a person should know of it.

    Raises:
        DataError: A source cannot be read, or has no rows; what was read before is given first.
    """
    for place, source in enumerate(sources):
        items: list[Row | Fault] = []
        files: list[int] = []
        numbers = {show_path(path): number for number, path in enumerate(source.files)}
        first = True
        try:
            for item in parse_rows(source, say):
                items.append(Fault.of(item) if isinstance(item, RowError) else item)
                files.append(numbers.get(item.where.rpartition(":")[0], 0))
                if len(items) == size:
                    yield Chunk(place, items, files, first, last=False)
                    items, files, first = [], [], False
        except DataError:
            yield Chunk(place, items, files, first, last=False)
            raise
        yield Chunk(place, items, files, first, last=True)


def encode_chunk(
    chunk: Chunk,
    tokenizer: "PreTrainedTokenizerBase",
    encoding: Encoding,
    look: Look | None = None,
) -> EncodedChunk:
    """Tokenise a chunk.

    Raises:
        DataError: `look` refused the rows.
    """
    rows = [item for item in chunk.items if isinstance(item, Row)]
    found = iter(
        encode_rows(
            rows, tokenizer, encoding.max_length, encoding.overlong, encoding.train_on_prompt
        )
    )
    used: list[Encoded] = []
    files: list[int] = []
    lines: list[int] = []
    skipped: list[tuple[SkipReason, str]] = []
    faults: list[tuple[int, Fault]] = []
    longest = num_used = num_split = 0
    for number, item in enumerate(chunk.items, start=1):
        if isinstance(item, Fault):
            faults.append((number, item))
            continue
        encoded = next(found)
        if isinstance(encoded, DataError):
            faults.append((number, Fault.of(encoded)))
            continue
        if look is not None:
            look(item, encoded)
        parts = (encoded, *encoded.rest)
        longest = max(longest, *(part.num_tokens for part in parts), 0)
        if encoded.skipped is not None:
            skipped.append((encoded.skipped, item.where))
            continue
        num_used += 1
        num_split += bool(encoded.rest)
        kept = [part for part in parts if part.skipped is None]
        used += kept
        files += [chunk.files[number - 1]] * len(kept)
        lines += [_line(item.where)] * len(kept)
    lengths = np.array([len(part.input_ids) for part in used], dtype=np.int64)
    num_tokens = int(lengths.sum())
    labels = chain.from_iterable(part.labels for part in used)
    return EncodedChunk(
        source=chunk.source,
        last=chunk.last,
        format=rows[-1].format if rows else None,
        num_read=len(chunk.items),
        num_used=num_used,
        num_split=num_split,
        num_cut=sum(part.num_tokens > encoding.max_length for part in used),
        longest=longest,
        tokens=np.fromiter(
            chain.from_iterable(part.input_ids for part in used), np.int32, num_tokens
        ),
        is_target=np.fromiter(labels, np.int64, num_tokens) != IGNORED,
        lengths=lengths,
        files=np.array(files, dtype=np.int32),
        lines=np.array(lines, dtype=np.int64),
        skipped=tuple(skipped),
        faults=tuple(faults),
    )


def _line(where: str) -> int:
    """The line of a place such as `data/train.jsonl:12`."""
    return int(where.rpartition(":")[2])
