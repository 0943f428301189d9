"""From sources to rows of tokens: once, in parallel, and from the cache from then on.

A row's tokens depend on the files' content, the tokenizer and its template, the options and the
program; a key of all these names the rows in the cache. The content of files is read and hashed at
every start, as that is far faster than tokenising, and sizes and times prove nothing.
"""

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal, cast

from megatrain_cli.data.bad_rows import OnBadRow
from megatrain_cli.data.cache import Cache, disk_errors
from megatrain_cli.data.cache_key import preparation_key
from megatrain_cli.data.chunks import Encoding, read_chunks
from megatrain_cli.data.content import FileContent, hash_files
from megatrain_cli.data.first_rows import FirstRowsOfSources
from megatrain_cli.data.source import SourceFile
from megatrain_cli.data.summary import DataSummary, Tally
from megatrain_cli.data.table import Examples, TableWriter, hash_rows
from megatrain_cli.data.workers import encode_chunks
from megatrain_cli.errors import CorruptError, DataError, StorageError
from megatrain_cli.probe.cgroup import usable_cores
from megatrain_cli.units import MIB

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Below it tokenising takes less than starting a process that does it, or than a cache saves.
SMALL_BYTES = 32 * MIB

_TEMPORARY_FULL = "Make room, or set TMPDIR, or `data.cache_dir`, to a folder on another disk."

Progress = Callable[[int, float], None]
"""Rows so far, and the share of all bytes that they take, from 0 to 1."""


@dataclass(frozen=True)
class HowToPrepare:
    """What changes no row.

    Attributes:
        workers: Processes that tokenise; `auto` is all cores for large files.
        cache_dir: Where prepared rows are kept; None keeps none; `auto` keeps those of large files
            in the user's cache folder.
        progress: Told how far it has come, often.
        say: Told what a person should know.
    """

    workers: int | Literal["auto"] = "auto"
    cache_dir: Path | Literal["auto"] | None = "auto"
    progress: Progress = lambda rows, share: None
    say: Callable[[str], None] = lambda text: None


@dataclass(frozen=True)
class Prepared:
    """All rows of a run.

    Attributes:
        contents: The files of each source, as they were read; none for a data set of a hub.
        rows_xxh3_128: What `hash_rows` gives.
    """

    examples: Examples
    summary: DataSummary
    contents: tuple[tuple[FileContent, ...], ...]
    rows_xxh3_128: str


def prepare(
    sources: Sequence[SourceFile],
    tokenizer: "PreTrainedTokenizerBase",
    encoding: Encoding,
    on_bad_row: OnBadRow = "error",
    max_bad_share: float = 0.0,
    how: HowToPrepare | None = None,
) -> Prepared:
    """Read and tokenise all sources, in order, or take what was made of them before.

    Raises:
        DataError: A row cannot be used, no row has anything to learn, or a file changed meanwhile.
        StorageError: The disk refused.
    """
    how = how or HowToPrepare()
    names = [source.name for source in sources]
    contents = [hash_files(source) for source in sources]
    job = _Job(sources, names, contents, tokenizer, encoding, on_bad_row, max_bad_share, how)
    # What a hub holds under a name can change, and nothing here tells.
    can_keep = all(source.hub is None for source in sources)
    if not can_keep and isinstance(how.cache_dir, Path):
        how.say("data.cache_dir: has no effect on data sets of a hub, which may change there")
    cache = _open_cache(how, job.num_bytes) if can_keep else None
    if cache is None:
        return job.in_temporary_files()
    key = preparation_key(sources, contents, tokenizer, encoding, on_bad_row, max_bad_share)
    return _look_up(cache, key, job) or _make_locked(cache, key, job)


def was_prepared(
    sources: Sequence[SourceFile],
    tokenizer: "PreTrainedTokenizerBase",
    encoding: Encoding,
    on_bad_row: OnBadRow,
    max_bad_share: float,
    how: HowToPrepare,
) -> bool:
    """Whether `prepare` would find these rows in the cache; all files are read to tell.

    Raises:
        DataError: A file cannot be read.
    """
    if any(source.hub is not None for source in sources):
        return False
    contents = [hash_files(source) for source in sources]
    num_bytes = sum(file.num_bytes for files in contents for file in files)
    folder = _cache_folder(how, num_bytes)
    if folder is None or not folder.is_dir():
        return False
    key = preparation_key(sources, contents, tokenizer, encoding, on_bad_row, max_bad_share)
    return (folder / key).is_dir()


def _look_up(cache: Cache, key: str, job: "_Job") -> Prepared | None:
    try:
        found = cache.open(key, job.names)
    except CorruptError:
        return None  # looked at again under the lock, and removed there
    if found is None:
        return None
    job.how.say(f"rows were prepared before: {cache.folder / key}")
    return job.prepared(*found)


def _make_locked(cache: Cache, key: str, job: "_Job") -> Prepared:
    with cache.lock(key, job.how.say):
        try:
            found = cache.open(key, job.names)  # another process may have made it
        except CorruptError as error:
            job.how.say(f"{error} The rows are prepared again.")
            cache.remove(key)
            found = None
        if found is not None:
            job.how.say(f"rows were prepared meanwhile: {cache.folder / key}")
            return job.prepared(*found)
        with cache.make(key) as entry, closing(TableWriter(entry.open_file)) as writer:
            examples, summary = job.run(writer)
            digest = entry.publish(writer, examples, summary, job.names, job.contents)
        job.how.say(f"prepared rows are kept in {cache.folder / key}")
        return job.prepared(examples, summary, digest)


@dataclass(frozen=True)
class _Job:
    """What is to be prepared, and how."""

    sources: Sequence[SourceFile]
    names: list[str]
    contents: list[tuple[FileContent, ...]]
    tokenizer: "PreTrainedTokenizerBase"
    encoding: Encoding
    on_bad_row: OnBadRow
    max_bad_share: float
    how: HowToPrepare

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum(file.num_bytes for files in self.contents for file in files)

    def prepared(self, examples: Examples, summary: DataSummary, digest: str) -> Prepared:
        """The result."""
        return Prepared(examples, summary, tuple(self.contents), digest)

    def in_temporary_files(self) -> Prepared:
        """Prepare rows that nobody keeps: their files have no names, and end with the process."""

        def open_file(name: str) -> BinaryIO:
            return cast(BinaryIO, tempfile.TemporaryFile(prefix=f"megatrain-{name}-"))

        folder = Path(tempfile.gettempdir())
        with disk_errors(folder, _TEMPORARY_FULL), closing(TableWriter(open_file)) as writer:
            examples, summary = self.run(writer)
        return self.prepared(examples, summary, hash_rows(examples))

    def run(self, writer: TableWriter) -> tuple[Examples, DataSummary]:
        """Write all rows.

        Raises:
            DataError: As `prepare`.
            OSError: The disk refused.
        """
        tally = Tally(self.names, self.on_bad_row, self.max_bad_share)
        workers = self.how.workers
        if workers == "auto":
            workers = usable_cores() if self.num_bytes >= SMALL_BYTES else 1
        first = FirstRowsOfSources(self.encoding.train_on_prompt)
        chunks = encode_chunks(
            read_chunks(self.sources, say=tally.notes.append),
            self.tokenizer,
            self.encoding,
            workers,
            first.add,
        )
        done = 0
        for chunk in chunks:
            tally.add(chunk)
            writer.add(chunk.tokens, chunk.is_target, chunk.lengths, chunk.files, chunk.lines)
            if chunk.last:
                done += sum(file.num_bytes for file in self.contents[chunk.source])
            line = int(chunk.lines[-1]) if len(chunk.lines) else 0
            self.how.progress(tally.num_read, self._share(done, chunk.source, chunk.last, line))
        if writer.num_rows:  # with nothing at all, the whole account is the better message
            tally.notes += [*first.finish(), *self._idle_prompts(tally)]
        summary = tally.summary(writer.num_tokens, writer.num_targets, self.encoding.max_length)
        if not writer.num_rows:
            raise DataError("\n".join(["no row has anything to learn", *summary.lines()]))
        self._check_unchanged()
        return writer.map(), summary

    def _idle_prompts(self, tally: Tally) -> list[str]:
        """Where the format was named, the config's rules have said so."""
        asked = self.encoding.train_on_prompt and set(tally.formats.values()) == {"text"}
        if not asked or all(source.format == "text" for source in self.sources):
            return []
        return ["data.train_on_prompt: has no effect on texts: they have no prompt"]

    def _share(self, done: int, source: int, is_done: bool, line: int) -> float:
        """How much of all bytes was read, by the line of the last row of a source of one file."""
        files = self.contents[source]
        if not is_done and len(files) == 1 and files[0].num_lines:
            done += int(files[0].num_bytes * min(1, line / files[0].num_lines))
        return done / self.num_bytes if self.num_bytes else 0.0

    def _check_unchanged(self) -> None:
        """Refuse rows of a file that was written to while it was read: no key names them."""
        for source, before in zip(self.sources, self.contents, strict=True):
            if hash_files(source) != before:
                raise DataError(
                    f"{source.name}: changed while it was read. Start again once nothing writes "
                    "to it."
                )


def _open_cache(how: HowToPrepare, num_bytes: int) -> Cache | None:
    """Where the rows are kept; None where they are not."""
    folder = _cache_folder(how, num_bytes)
    if folder is None:
        return None
    if how.cache_dir != "auto":
        return Cache(folder)
    try:
        return Cache(folder)
    except StorageError as error:  # nobody asked for that folder: a run needs none
        how.say(f"{error} They are prepared at each start.")
        return None


def _cache_folder(how: HowToPrepare, num_bytes: int) -> Path | None:
    if how.cache_dir != "auto":
        return how.cache_dir
    if num_bytes < SMALL_BYTES:
        return None
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "megatrain" / "data"
