"""A row as text again, and the tokenizer that makes and reads tokens."""

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megatrain_cli.data.table import Examples
from megatrain_cli.data.template import IGNORED
from megatrain_cli.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def preview(
    examples: Examples, tokenizer: "PreTrainedTokenizerBase", i: int
) -> list[tuple[str, bool]]:
    """A row as text, cut where training begins and ends: `[(text, is trained on), ...]`."""
    return cut_spans(*examples.row(i), tokenizer)


def cut_spans(
    input_ids: NDArray[np.int64], labels: NDArray[np.int64], tokenizer: "PreTrainedTokenizerBase"
) -> list[tuple[str, bool]]:
    """Tokens as text, cut where training begins and ends; both arrays are `(length,)`."""
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
        reason = " ".join(str(error).split())  # transformers' own has several lines
        raise ModelError(f"{folder}: the tokenizer cannot be read: {reason}") from None
