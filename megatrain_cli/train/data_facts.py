"""What the rows of a run are, by content: names and times of files decide nothing."""

from collections.abc import Collection
from pathlib import Path

import xxhash
from pydantic import JsonValue

from megatrain_cli.checkpoint.facts import DataFacts, SourceFile
from megatrain_cli.config.schema import TrainConfig
from megatrain_cli.data.examples import Examples
from megatrain_cli.data.sampler import ORDER
from megatrain_cli.errors import DataError, IncompatibleError
from megatrain_cli.train.rows import TrainingRows
from megatrain_cli.units import MIB

# Keys that decide which tokens a file's rows become.
_MAKE_ROWS = (
    "data.train",
    "data.format",
    "data.template",
    "data.max_length",
    "data.packing",
    "data.overlong",
    "data.train_on_prompt",
)
_CHUNK_BYTES = 16 * MIB
_ALLOW = "add `--allow-change data.train` to go on with them from the same number of rows"


def data_facts(config: TrainConfig, rows: TrainingRows) -> DataFacts:
    """Of the rows as they were read, at the position where the run starts. Reads all files again.

    Raises:
        DataError: A file cannot be read any more.
    """
    return DataFacts(
        rows_xxh3_128=hash_rows(rows.examples),
        num_rows=len(rows.examples),
        sources=tuple(hash_file(Path(source.path)) for source in config.data.train),
        order=ORDER,
        seed=config.train.seed,
        shuffle=config.data.shuffle,
        next_row=rows.start.row,
        rows_per_step=rows.rows_per_step,
    )


def hash_rows(examples: Examples) -> str:
    """xxh3-128 of all token ids, what of them is learnt, and where rows begin."""
    digest = xxhash.xxh3_128()
    for array in (examples.offsets, examples.tokens, examples.is_target):
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        digest.update(f"{array.dtype.name} {len(array)}\n".encode())
        digest.update(little.data)
    return digest.hexdigest()


def hash_file(path: Path) -> SourceFile:
    """A file's size and xxh3-128, read piece by piece.

    Raises:
        DataError: It cannot be read.
    """
    digest, size = xxhash.xxh3_128(), 0
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                size += len(chunk)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    return SourceFile(name=path.name, path=str(path), bytes=size, xxh3_128=digest.hexdigest())


def check_data(
    saved: DataFacts, now: DataFacts, allowed: Collection[str], step: int
) -> list[dict[str, JsonValue]]:
    """Refuse rows that are not those the run was begun with, unless that was allowed.

    Args:
        saved: From the checkpoint.
        now: Of the files as they are.
        allowed: Keys that the user named.
        step: Steps completed in the checkpoint.

    Returns:
        What belongs in the checkpoint's lineage: files with other content.

    Raises:
        IncompatibleError: A file has other content, files are in another order or number, or the
            same files give other tokens.
    """
    if saved.order != now.order:
        raise IncompatibleError(
            f"The order of rows follows the rule {saved.order!a} in the checkpoint and "
            f"{now.order} in this version. Use the version of megatrain that saved it."
        )
    was, is_now = (tuple(s.xxh3_128 for s in facts.sources) for facts in (saved, now))
    if was != is_now:
        if "data.train" not in allowed:
            raise IncompatibleError(_explain(saved.sources, now.sources))
        return [{"step": step, "key": "data.train", "old": list(was), "new": list(is_now)}]
    if saved.rows_xxh3_128 != now.rows_xxh3_128 and not set(_MAKE_ROWS).intersection(allowed):
        raise IncompatibleError(
            f"The data files are those of the checkpoint, but they give other tokens: "
            f"{saved.num_rows} rows then, {now.num_rows} now. The tokenizer, its template or the "
            "library that reads it has changed; use those that the run was begun with."
        )
    return []


def _explain(was: tuple[SourceFile, ...], now: tuple[SourceFile, ...]) -> str:
    if sorted(s.xxh3_128 for s in was) == sorted(s.xxh3_128 for s in now):
        names = ", ".join(_name(source) for source in was)
        return (
            f"The data files are in another order; the checkpoint has {names}. Give them in that "
            f"order, or {_ALLOW}."
        )
    if len(was) != len(now):
        names = ", ".join(_name(source) for source in was)
        return (
            f"The checkpoint was made with {len(was)} data files ({names}), and there are "
            f"{len(now)} now. Give the same ones, or {_ALLOW}."
        )
    lines = [
        f"{new.path}: not the content that the run was begun with: {new.bytes} bytes now, "
        f"{old.bytes} then ({_name(old)})."
        for old, new in zip(was, now, strict=True)
        if old.xxh3_128 != new.xxh3_128
    ]
    return "\n".join([*lines, f"Restore what was there, or {_ALLOW}."])


def _name(source: SourceFile) -> str:
    # From a checkpoint, which may be damaged or hostile: nothing of it controls a terminal.
    return ascii(source.name)[1:-1]
