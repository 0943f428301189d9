"""From a config to rows of tokens: tokenizer, template, sources, preparation."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatrain_cli.config.schema import TrainConfig
from megatrain_cli.data.chunks import Encoding
from megatrain_cli.data.examples import load_tokenizer
from megatrain_cli.data.files import show_path
from megatrain_cli.data.known import use_template
from megatrain_cli.data.prepare import HowToPrepare, Prepared, Progress, prepare, was_prepared
from megatrain_cli.data.repeats import ReadFile, read_files, repeated
from megatrain_cli.data.source import SourceFile
from megatrain_cli.data.sources import find_sources

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class LoadedData:
    """All documents of a config, and what made them.

    Attributes:
        tokenizer: With the template of the config.
        files: Each time that one is read.
        repeats: Lines on those that are read more than once; the summary's notes have them too.
    """

    tokenizer: "PreTrainedTokenizerBase"
    sources: tuple[SourceFile, ...]
    prepared: Prepared
    files: tuple[ReadFile, ...] = ()
    repeats: tuple[str, ...] = ()

    def place(self, i: int) -> tuple[str, int]:
        """Where a document came from: the file, as a user would write it, and its line or row."""
        examples = self.prepared.examples
        assert examples.files is not None  # prepared rows have them
        assert examples.lines is not None
        ends = np.cumsum(self.prepared.summary.used_by_source)
        source = int(np.searchsorted(ends, i, side="right"))
        hub, line = self.sources[source].hub, int(examples.lines[i])
        if hub is not None:
            return hub.shown, line
        return show_path(self.prepared.contents[source][examples.files[i]].path), line


def load_data(
    config: TrainConfig,
    say: Callable[[str], None] = lambda text: None,
    progress: Progress = lambda rows, share: None,
) -> LoadedData:
    """Read and tokenise all data, or take what was made of it before.

    Raises:
        DataError: A row cannot be used, or none has anything to learn.
        ModelError: The model folder has no tokenizer.
        StorageError: The disk refused.
    """
    data, tokenizer = config.data, _tokenizer_of(config)
    sources = find_sources(data)
    prepared = prepare(
        sources,
        tokenizer,
        Encoding(data.max_length, data.overlong, data.train_on_prompt),
        data.on_bad_row,
        data.max_bad_share,
        HowToPrepare(data.workers, data.cache_dir, progress, say),
    )
    without_turns = {"text", "tokenized"}
    if data.template is not None and without_turns.issuperset(prepared.summary.formats.values()):
        say(
            "data.template: no row is a chat, so nothing is written with it; it is saved with the "
            "model all the same"
        )
    files = read_files(sources, prepared)
    lines = tuple(repeated(files, "data.train", "Name it once, or once with a `weight`"))
    summary = replace(prepared.summary, notes=(*prepared.summary.notes, *lines))
    prepared = replace(prepared, summary=summary)
    return LoadedData(tokenizer, sources, prepared, tuple(files), lines)


def is_prepared(config: TrainConfig) -> bool:
    """Whether `load_data` would find the rows in the cache; all files are read to tell.

    Raises:
        DataError: A file cannot be read.
        ModelError: The model folder has no tokenizer.
    """
    data = config.data
    return was_prepared(
        find_sources(data),
        _tokenizer_of(config),
        Encoding(data.max_length, data.overlong, data.train_on_prompt),
        data.on_bad_row,
        data.max_bad_share,
        HowToPrepare(data.workers, data.cache_dir),
    )


def _tokenizer_of(config: TrainConfig) -> "PreTrainedTokenizerBase":
    tokenizer = load_tokenizer(Path(config.model.path))
    use_template(tokenizer, config.data.template)
    return tokenizer
