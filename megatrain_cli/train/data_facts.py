"""What the rows of a run are, by content: names and times of files decide nothing."""

from collections.abc import Collection, Sequence

import xxhash
from pydantic import JsonValue

from megatrain_cli.checkpoint.facts import DataFacts, SourceFile
from megatrain_cli.config.schema import TrainConfig
from megatrain_cli.data.content import FileContent
from megatrain_cli.data.held_out import HELD_OUT
from megatrain_cli.data.mixing import MIXING
from megatrain_cli.data.source import SourceFile as DataSource
from megatrain_cli.data.sources import find_sources
from megatrain_cli.errors import IncompatibleError
from megatrain_cli.train.rows import TrainingRows
from megatrain_cli.units import show_number

# Keys that decide which tokens a file's rows become.
_MAKE_ROWS = (
    "data.train",
    "data.format",
    "data.template",
    "data.on_bad_row",
    "data.max_length",
    "data.overlong",
    "data.train_on_prompt",
)
_KEYS_OF_RULES = {HELD_OUT: "data.eval_share", MIXING: "data.train"}
_ALLOW = "add `--allow-change data.train` to go on with them from the same number of rows"


def data_facts(config: TrainConfig, rows: TrainingRows) -> DataFacts:
    """Of the rows as they were read, at the position where the run starts."""
    sources = zip(find_sources(config.data), rows.data.contents, strict=True)
    return DataFacts(
        rows_xxh3_128=rows.data.rows_xxh3_128,
        num_rows=rows.rows_per_epoch,
        sources=tuple(facts for source, files in sources for facts in source_facts(source, files)),
        order=rows.order,
        seed=config.train.seed,
        shuffle=config.data.shuffle,
        next_row=rows.start.row,
        rows_per_step=rows.rows_per_step,
    )


def source_facts(source: DataSource, files: Sequence[FileContent]) -> tuple[SourceFile, ...]:
    """All files of a source. A hub's rows are no files: there its name decides, and the tokens."""
    if source.hub is None:
        return tuple(
            SourceFile(
                name=file.path.name,
                path=str(file.path),
                bytes=file.num_bytes,
                xxh3_128=file.xxh3_128,
            )
            for file in files
        )
    hub = source.hub
    name = "\n".join((hub.path, hub.subset or "", hub.split, hub.revision or ""))
    digest = xxhash.xxh3_128(name.encode()).hexdigest()
    return (SourceFile(name=hub.shown, path=hub.path, bytes=0, xxh3_128=digest),)


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
    if _rules(saved.order, allowed) != _rules(now.order, allowed):
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
            "The data files are those of the checkpoint, but they give other tokens: "
            f"{show_number(saved.num_rows, 'row')} then, {now.num_rows} now. The tokenizer, its "
            "template or the library that reads it has changed; use those that the run was begun "
            "with."
        )
    return []


def _rules(order: str, allowed: Collection[str]) -> list[str]:
    """Rules of order, but those that come and go with the value of a key that may change."""
    return [rule for rule in order.split("+") if _KEYS_OF_RULES.get(rule) not in allowed]


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
            f"The checkpoint was made with {show_number(len(was), 'data file')} ({names}), and "
            f"there are {len(now)} now. Give the same ones, or {_ALLOW}."
        )
    lines = [
        f"{new.path}: not the content that the run was begun with: {_sizes(old, new)} "
        f"({_name(old)})."
        for old, new in zip(was, now, strict=True)
        if old.xxh3_128 != new.xxh3_128
    ]
    return "\n".join([*lines, f"Restore what was there, or {_ALLOW}."])


def _sizes(old: SourceFile, new: SourceFile) -> str:
    if new.bytes == old.bytes:
        return f"{new.bytes} bytes as then, but others"
    return f"{new.bytes} bytes now, {old.bytes} then"


def _name(source: SourceFile) -> str:
    # From a checkpoint, which may be damaged or hostile: nothing of it controls a terminal.
    return ascii(source.name)[1:-1]
