"""All rows of a run as tokens in memory, and an account of the rows that were read.

Tokens lie in one flat array, a mask says which are targets, offsets say where rows begin: eight
bytes for a token would be twice what ids need, and a list of lists ten times.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megatrain_cli.data.first_rows import FirstRows
from megatrain_cli.data.source import SourceFile, read_rows, show_path
from megatrain_cli.data.template import IGNORED, Overlong, SkipReason, encode_row
from megatrain_cli.errors import DataError, ModelError
from megatrain_cli.units import show_count

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# How many places of skipped rows the summary names for one reason.
_NUM_PLACES = 3


@dataclass(frozen=True)
class Examples:
    """Rows to train on, in the order of the files.

    Attributes:
        tokens: `(num_tokens,)` int32, all rows one behind the other.
        is_target: `(num_tokens,)` bool; not shifted.
        offsets: `(num_rows + 1,)` int64: row i is `tokens[offsets[i] : offsets[i + 1]]`.
    """

    tokens: NDArray[np.int32]
    is_target: NDArray[np.bool_]
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, i: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Token ids and labels of a row, both `(length,)`; labels are -100 where none is learnt."""
        part = slice(self.offsets[i], self.offsets[i + 1])
        input_ids = self.tokens[part].astype(np.int64)
        return input_ids, np.where(self.is_target[part], input_ids, np.int64(IGNORED))

    def num_targets(self, i: int) -> int:
        """How many tokens of a row are predicted and compared: nothing predicts the first."""
        return int(np.count_nonzero(self.is_target[self.offsets[i] + 1 : self.offsets[i + 1]]))


@dataclass(frozen=True)
class SkippedRows:
    """Rows left out for one reason: how many, and where the first of them are."""

    count: int
    places: tuple[str, ...]


@dataclass(frozen=True)
class DataSummary:
    """What became of every row: `num_read` is `num_used` and all that was skipped.

    Attributes:
        formats: By file, the format its rows were read as.
        num_tokens: Of the rows used, after cutting.
        num_targets: Tokens that are predicted and compared.
        num_cut: Rows used that were longer than `max_length`.
        longest: Tokens of the longest row that was tokenised, before cutting.
        max_length: What rows were cut to.
        num_split: Chats that became several rows, because the template writes earlier turns in
            another way once the chat goes on.
        notes: What else a person should know.
    """

    formats: dict[str, str]
    num_read: int
    num_used: int
    skipped: dict[SkipReason, SkippedRows]
    num_tokens: int
    num_targets: int
    num_cut: int
    longest: int
    max_length: int
    num_split: int = 0
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """The account as text, a line a fact."""
        lines = [f"{file}: read as {found}" for file, found in self.formats.items()]
        left_out = self.num_read - self.num_used
        lines.append(f"{self.num_read} rows read, {self.num_used} used, {left_out} skipped")
        for reason, rows in self.skipped.items():
            more = ", ..." if rows.count > len(rows.places) else ""
            lines.append(f"skipped {rows.count}: {reason} ({', '.join(rows.places)}{more})")
        if self.num_split:
            lines.append(
                f"{self.num_split} chats became several rows each: the chat template writes "
                "earlier turns in another way once a chat goes on"
            )
        if self.num_used:
            share = 100 * self.num_targets / self.num_tokens
            lines.append(
                f"{show_count(self.num_tokens)} tokens, {show_count(self.num_targets)} of them "
                f"targets ({share:.0f} %)"
            )
        cut = f"; {self.num_cut} cut to data.max_length {self.max_length}" if self.num_cut else ""
        lines.append(f"longest row {self.longest} tokens{cut}")
        lines += self.notes
        return lines


def load_examples(
    files: Sequence[SourceFile],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_length: int,
    overlong: Overlong,
    train_on_prompt: bool,
) -> tuple[Examples, DataSummary]:
    """Read and tokenise all files, in order. No weight is needed for that, so it comes first.

    Raises:
        DataError: A row cannot be used, or no row has anything to learn.
    """
    tokens, is_target, offsets = array("i"), bytearray(), array("q", [0])
    formats: dict[str, str] = {}
    places: dict[SkipReason, list[str]] = {}
    look = FirstRows(train_on_prompt)
    num_read = num_used = num_split = num_cut = longest = 0
    for file in files:
        for row in read_rows(file):
            formats[show_path(file.path)] = row.format
            encoded = encode_row(row, tokenizer, max_length, overlong, train_on_prompt)
            look.add(row, encoded)
            num_read += 1
            longest = max(longest, *(part.num_tokens for part in (encoded, *encoded.rest)), 0)
            if encoded.skipped is not None:
                places.setdefault(encoded.skipped, []).append(row.where)
                continue
            num_used += 1
            num_split += bool(encoded.rest)
            for part in (encoded, *encoded.rest):
                if part.skipped is not None:
                    continue
                num_cut += part.num_tokens > max_length
                tokens.extend(part.input_ids)
                is_target.extend(label != IGNORED for label in part.labels)
                offsets.append(len(tokens))
    if offsets[-1]:  # with nothing at all, the whole account is the better message
        look.finish()
    examples = Examples(
        np.asarray(tokens, dtype=np.int32),
        np.frombuffer(is_target, dtype=np.bool_),
        np.asarray(offsets, dtype=np.int64),
    )
    summary = DataSummary(
        formats=formats,
        num_read=num_read,
        num_used=num_used,
        num_split=num_split,
        notes=tuple(look.notes),
        skipped={
            reason: SkippedRows(len(found), tuple(found[:_NUM_PLACES]))
            for reason, found in places.items()
        },
        num_tokens=len(tokens),
        num_targets=sum(examples.num_targets(i) for i in range(len(examples))),
        num_cut=num_cut,
        longest=longest,
        max_length=max_length,
    )
    if not len(examples):
        raise DataError("\n".join(["no row has anything to learn", *summary.lines()]))
    return examples, summary


def preview(
    examples: Examples, tokenizer: "PreTrainedTokenizerBase", i: int
) -> list[tuple[str, bool]]:
    """A row as text, cut where training begins and ends: `[(text, is trained on), ...]`."""
    input_ids, labels = examples.row(i)
    is_target = labels != IGNORED
    edges = [0, *(np.flatnonzero(is_target[1:] != is_target[:-1]) + 1), len(input_ids)]
    spans = []
    for start, stop in pairwise(edges):
        text = tokenizer.decode(input_ids[start:stop].tolist(), clean_up_tokenization_spaces=False)
        spans.append((str(text), bool(is_target[start])))
    return spans


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> "PreTrainedTokenizerBase":
    """The tokenizer of a model folder. Nothing is fetched.

    Raises:
        ModelError: The folder is missing, or holds no tokenizer that can be read.
    """
    # Imported here: transformers takes seconds, and a fault in the data files needs none of it.
    from transformers import AutoTokenizer  # noqa: PLC0415

    if not folder.is_dir():
        raise ModelError(f"{folder}: there is no such model folder")
    # Without these transformers goes by the model's type alone, and makes an empty tokenizer.
    known = (
        "tokenizer.json",
        "tokenizer.model",
        "vocab.json",
        "tokenizer_config.json",
        "vocab.txt",
    )
    if not any((folder / name).exists() for name in known):
        raise ModelError(
            f"{folder}: the folder has no tokenizer (tokenizer.json is missing). "
            "Copy the tokenizer files of the model into it."
        )
    try:
        return AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ModelError(f"{folder}: the tokenizer cannot be read: {error}") from None
