"""Rows as a run would have them, kept nowhere."""

from collections.abc import Sequence
from typing import Any

from megatrain_cli.data.bad_rows import OnBadRow
from megatrain_cli.data.chunks import Encoding
from megatrain_cli.data.prepare import HowToPrepare, prepare
from megatrain_cli.data.source import SourceFile
from megatrain_cli.data.summary import DataSummary
from megatrain_cli.data.table import Examples
from megatrain_cli.data.template import Overlong


def load_examples(
    sources: Sequence[SourceFile],
    tokenizer: Any,
    *,
    max_length: int,
    overlong: Overlong,
    train_on_prompt: bool,
    on_bad_row: OnBadRow = "error",
    max_bad_share: float = 0.0,
) -> tuple[Examples, DataSummary]:
    """Read and tokenise all sources, in order."""
    found = prepare(
        sources,
        tokenizer,
        Encoding(max_length, overlong, train_on_prompt),
        on_bad_row,
        max_bad_share,
        HowToPrepare(cache_dir=None),
    )
    return found.examples, found.summary
