"""All rows of a run as arrays, written once and mapped into memory.

Tokens lie in one flat array, a mask says which are targets, offsets say where rows begin: eight
bytes for a token would be twice what ids need, and a list of lists ten times. The arrays lie in
files, so that rows may be more than the machine's RAM.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatrain_cli.data.template import IGNORED

# Array -> how its numbers lie in a file.
DTYPES = {"tokens": "<i4", "is_target": "|b1", "offsets": "<i8", "files": "<i4", "lines": "<i8"}


@dataclass(frozen=True)
class Examples:
    """Rows to train on, in the order of the files.

    Attributes:
        tokens: `(num_tokens,)` int32, all rows one behind the other.
        is_target: `(num_tokens,)` bool; not shifted.
        offsets: `(num_rows + 1,)` int64: row i is `tokens[offsets[i] : offsets[i + 1]]`.
        lines: `(num_rows,)` int64, the line, or the row, of its file; None where nobody knows.
        files: `(num_rows,)` int32, the number of its file within its source; None likewise.
    """

    tokens: NDArray[np.int32]
    is_target: NDArray[np.bool_]
    offsets: NDArray[np.int64]
    lines: NDArray[np.int64] | None = None
    files: NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row, `(num_rows,)`."""
        return np.diff(self.offsets)

    @cached_property
    def targets(self) -> NDArray[np.int32]:
        """Of each row, how many of its tokens are predicted and compared, `(num_rows,)`.

        Nothing predicts the first.
        """
        # Row by row: of 480 million tokens 0.3 s, where `np.add.reduceat` took 5 (two cores).
        is_target, offsets = self.is_target, self.offsets.tolist()
        found = (np.count_nonzero(is_target[a + 1 : b]) for a, b in pairwise(offsets))
        return np.fromiter(found, np.int32, len(self))

    @property
    def nbytes(self) -> int:
        """Of all arrays."""
        arrays = (self.tokens, self.is_target, self.offsets, self.lines, self.files)
        return sum(array.nbytes for array in arrays if array is not None)

    def row(self, i: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Token ids and labels of a row, both `(length,)`; labels are -100 where none is learnt."""
        part = slice(self.offsets[i], self.offsets[i + 1])
        input_ids = self.tokens[part].astype(np.int64)
        return input_ids, np.where(self.is_target[part], input_ids, np.int64(IGNORED))


class TableWriter:
    """Appends rows to the files of a table; holds none of them.

    Args:
        open_file: Makes the file of an array, for writing and reading.
    """

    def __init__(self, open_file: Callable[[str], BinaryIO]) -> None:
        self.num_rows = self.num_tokens = self.num_targets = 0
        with ExitStack() as stack:
            self._files = {name: stack.enter_context(open_file(name)) for name in DTYPES}
            self._stack = stack.pop_all()
        self._write("offsets", np.zeros(1, np.int64))

    def add(
        self,
        tokens: NDArray[np.int32],
        is_target: NDArray[np.bool_],
        lengths: NDArray[np.int64],
        files: NDArray[np.int32],
        lines: NDArray[np.int64],
    ) -> None:
        """Append rows; the arrays are as those of `EncodedChunk`."""
        ends = np.cumsum(lengths)
        offsets = self.num_tokens + ends
        self._write("tokens", tokens)
        self._write("is_target", is_target)
        self._write("offsets", offsets)
        self._write("files", files)
        self._write("lines", lines)
        self.num_rows += len(lengths)
        self.num_tokens += len(tokens)
        self.num_targets += int(np.count_nonzero(is_target))
        self.num_targets -= int(np.count_nonzero(is_target[ends - lengths]))

    def flush(self) -> list[int]:
        """Hand everything to the system; the files' descriptors."""
        for file in self._files.values():
            file.flush()
        return [file.fileno() for file in self._files.values()]

    def map(self) -> Examples:
        """The rows so far. The arrays live on when the writer is closed."""
        self.flush()
        return map_table({name: self._files[name] for name in DTYPES})

    def _write(self, name: str, values: NDArray[np.generic]) -> None:
        self._files[name].write(np.ascontiguousarray(values, dtype=DTYPES[name]).data)

    def close(self) -> None:
        """Close the files."""
        self._stack.close()


def map_table(files: dict[str, BinaryIO]) -> Examples:
    """Map the files of a table of at least one row; they may be closed then.

    Raises:
        ValueError: A file holds no whole number of elements, or none.
        OSError: It cannot be mapped.
    """
    arrays: dict[str, Any] = {name: _mapped(file, DTYPES[name]) for name, file in files.items()}
    return Examples(**arrays)


def _mapped(file: BinaryIO, dtype: str) -> NDArray[np.generic]:
    # As a plain array, which keeps the mapping alive: a slice of a memmap costs ten times as much.
    found: NDArray[np.generic] = np.memmap(file, dtype=dtype, mode="r").view(np.ndarray)
    return found


def hash_rows(examples: Examples) -> str:
    """xxh3-128 of all token ids, what of them is learnt, and where rows begin."""
    digest = xxhash.xxh3_128()
    for array in (examples.offsets, examples.tokens, examples.is_target):
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        digest.update(f"{array.dtype.name} {len(array)}\n".encode())
        digest.update(little.data)
    return digest.hexdigest()


def hash_places(examples: Examples) -> str:
    """xxh3-128 of where rows came from, which must be known."""
    assert examples.files is not None  # a writer's have them
    assert examples.lines is not None
    digest = xxhash.xxh3_128(examples.files.astype(DTYPES["files"], copy=False).data)
    digest.update(examples.lines.astype(DTYPES["lines"], copy=False).data)
    return digest.hexdigest()
