"""What prepared rows depend on, as one key: anything else and they are made anew."""

import importlib.metadata
import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from megatrain_cli import __version__
from megatrain_cli.data.chunks import Encoding
from megatrain_cli.data.content import FileContent
from megatrain_cli.data.source import SourceFile

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Of a source: where it lies, which its content stands for, and what concerns the order alone.
_NOT_ROWS = ("path", "index", "weight")

_LIBRARIES = ("transformers", "tokenizers", "sentencepiece", "jinja2", "pyarrow")


def preparation_key(
    sources: Sequence[SourceFile],
    contents: Sequence[Sequence[FileContent]],
    tokenizer: "PreTrainedTokenizerBase",
    encoding: Encoding,
    on_bad_row: str,
    max_bad_share: float,
) -> str:
    """32 hexadecimal digits that differ wherever the rows could.

    Args:
        sources: All of them, none of a hub.
        contents: Their files.
        tokenizer: With its chat template.
        encoding: What else decides.
        on_bad_row: Decides whether there are rows at all.
        max_bad_share: As well.
    """
    what = {
        "sources": [
            {name: repr(getattr(source, name)) for name in _field_names()} for source in sources
        ],
        "contents": [[(file.num_bytes, file.xxh3_128) for file in files] for files in contents],
        "tokenizer": hash_tokenizer(tokenizer),
        "encoding": asdict(encoding),
        "bad rows": (on_bad_row, max_bad_share),
        "program": (__version__, _hash_code()),
        "libraries": {name: _version(name) for name in _LIBRARIES},
    }
    return xxhash.xxh3_128_hexdigest(json.dumps(what, sort_keys=True).encode())


def hash_tokenizer(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Of all that decides which tokens a text becomes."""
    digest = xxhash.xxh3_128()
    digest.update(type(tokenizer).__qualname__.encode())
    if tokenizer.is_fast:
        backend = tokenizer.backend_tokenizer
        digest.update(backend.to_str().encode())
    else:
        digest.update(json.dumps(sorted(tokenizer.get_vocab().items())).encode())
        file = getattr(tokenizer, "vocab_file", None)
        if file is not None:
            digest.update(Path(file).read_bytes())
    made_with = {
        name: value
        for name, value in tokenizer.init_kwargs.items()
        if name != "name_or_path" and not name.endswith("_file")  # where it lies
    }
    settings = {
        "template": tokenizer.chat_template,
        "special": tokenizer.special_tokens_map,
        "made with": made_with,
    }
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def _field_names() -> list[str]:
    return [field.name for field in fields(SourceFile) if field.name not in _NOT_ROWS]


def _hash_code() -> str:
    """Of the modules that read, render and tokenise: a version is not raised at every change."""
    digest = xxhash.xxh3_128()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _version(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None
