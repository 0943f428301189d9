"""Prepared rows are the same however they were prepared, and are prepared once."""

import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.data import prepare as module
from megatrain_cli.data import source as source_module
from megatrain_cli.data import workers as workers_module
from megatrain_cli.data.chunks import Chunk, EncodedChunk, Encoding, encode_chunk, read_chunks
from megatrain_cli.data.formats import Row
from megatrain_cli.data.hub import HubSet
from megatrain_cli.data.source import SourceFile
from megatrain_cli.data.table import hash_rows
from megatrain_cli.data.template import Encoded, SkipReason
from megatrain_cli.data.workers import encode_chunks
from megatrain_cli.errors import DataError, DiskFullError, RowError
from megatrain_cli.probe import cgroup
from tests.data.preparing import BAD, ENCODING, content, open_full, prepare_here, write_rows
from tests.data.templates import make_tokenizer


def test_rows_come_with_their_lines_and_an_account(tmp_path: Path, chatml: Any) -> None:
    sources = [write_rows(tmp_path / "a.jsonl", 10), write_rows(tmp_path / "b.jsonl", 3, 20)]
    found = prepare_here(*sources, tokenizer=chatml)
    assert found.examples.lines is not None
    assert found.examples.lines.tolist() == [1, 2, 3, 4, 5, 6, 8, 9, 10, 2, 3]
    assert found.summary.used_by_source == (9, 2)
    assert found.summary.skipped[SkipReason.EMPTY].places == (
        f"{tmp_path}/a.jsonl:7",
        f"{tmp_path}/b.jsonl:1",
    )
    assert found.rows_xxh3_128 == hash_rows(found.examples)
    assert [[file.path for file in files] for files in found.contents] == [
        [source.path] for source in sources
    ]
    assert found.summary.num_targets == found.examples.targets.sum()


@given(st.integers(1, 30), st.integers(1, 40))
def test_chunks_of_any_size_hold_the_same_rows(
    tmp_path_factory: pytest.TempPathFactory, count: int, size: int
) -> None:
    tokenizer = make_tokenizer()
    folder = tmp_path_factory.mktemp("data")
    sources = [write_rows(folder / "a", count), write_rows(folder / "b", 5, 100)]

    def flat(size: int) -> tuple[list[Any], ...]:
        chunks = list(read_chunks(sources, size))
        assert [c.last for c in chunks].count(True) == [c.first for c in chunks].count(True) == 2
        made = [encode_chunk(chunk, tokenizer, ENCODING) for chunk in chunks]
        return (
            [t for chunk in made for t in chunk.tokens.tolist()],
            [t for chunk in made for t in chunk.is_target.tolist()],
            [t for chunk in made for t in chunk.lengths.tolist()],
            [t for chunk in made for t in chunk.lines.tolist()],
            [t for chunk in made for t in chunk.skipped],
            [sum(chunk.num_read for chunk in made)],
        )

    assert flat(size) == flat(1000)


def bad_file(path: Path, broken: bool) -> SourceFile:
    """A bad row at 600; with `broken`, one that cannot even be read at 650."""
    source = write_rows(path, 900)
    lines = source.path.read_text().splitlines()
    lines[599] = json.dumps(BAD)
    if broken:
        lines[649] = '{"instruction": '
    path.write_text("\n".join(lines))
    return source


@pytest.mark.slow
def test_any_number_of_processes_makes_the_same_bytes_and_errors(
    tmp_path: Path, chatml: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = [write_rows(tmp_path / "a", 700), bad_file(tmp_path / "b", broken=False)]
    made = [
        prepare_here(*sources, tokenizer=chatml, on_bad_row="skip", workers=workers)
        for workers in (1, 2)
    ]
    assert content(made[0]) == content(made[1])
    assert made[0].summary == made[1].summary
    for broken, on_bad_row in ((True, "error"), (True, "skip")):
        source = bad_file(tmp_path / "c", broken)
        said = []
        for workers in (1, 2):
            with pytest.raises(DataError) as caught:
                prepare_here(
                    source,
                    tokenizer=chatml,
                    on_bad_row=on_bad_row,  # type: ignore[arg-type]  # one of two
                    max_bad_share=0.001,
                    workers=workers,
                )
            said.append(f"{type(caught.value).__name__}: {caught.value}")
        assert said[0] == said[1]
        assert f"{tmp_path}/c:600" in said[0]


def die(chunk: Chunk) -> EncodedChunk:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError(chunk)


@pytest.mark.slow
def test_a_process_that_is_killed_is_one_clear_line(
    tmp_path: Path, chatml: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_rows(tmp_path / "a", 300)
    monkeypatch.setattr(workers_module, "_encode", die)
    with pytest.raises(DataError, match=r"was killed.*`data\.workers: 1`"):
        prepare_here(source, tokenizer=chatml, workers=1 + 1)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(130)"])
def test_processes_end_without_a_word_with_the_one_that_began_them(
    end: str, tmp_path: Path
) -> None:
    """As by a second Ctrl-C, which tells no pool. They would wait for rows for ever."""
    write_rows(tmp_path / "rows", 900)
    code = (
        "import os, signal, sys\nfrom pathlib import Path\n"
        "from megatrain_cli.data.chunks import read_chunks\n"
        "from megatrain_cli.data.source import SourceFile\n"
        "from megatrain_cli.data.workers import encode_chunks\n"
        "from tests.data.preparing import ENCODING\n"
        "from tests.data.templates import make_tokenizer\n"
        "chunks = read_chunks([SourceFile(Path(sys.argv[1]))], 10)\n"
        "done = encode_chunks(chunks, make_tokenizer(), ENCODING, 2)\n"
        f"next(done), next(done)\n{end}\n"
    )
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "rows")],
        env=os.environ | {"PYTHONPATH": str(root)},
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        said = process.communicate(timeout=60)[1]  # the last of them closes it
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode in (-signal.SIGKILL, 130)
    assert said == b""


def test_what_reading_raises_comes_behind_all_that_was_read(tmp_path: Path, chatml: Any) -> None:
    """Of two errors the one that stands first is told, whatever was read ahead."""
    good = write_rows(tmp_path / "a", 5)
    chunks = encode_chunks(
        read_chunks([good, SourceFile(tmp_path / "none")]), chatml, ENCODING, num_workers=1
    )
    assert next(chunks).num_read == 5
    with pytest.raises(DataError, match="no such file"):
        list(chunks)


@pytest.mark.parametrize("error", [RowError("f:3", "broken"), DataError("f: gone")])
def test_errors_keep_their_parts_between_processes(error: DataError) -> None:
    from megatrain_cli.data.chunks import Fault

    again = Fault.of(error).error()
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


def test_a_look_sees_the_first_chunk_of_each_source_and_may_refuse_it(
    tmp_path: Path, chatml: Any
) -> None:
    sources = [write_rows(tmp_path / "a", 300), write_rows(tmp_path / "b", 2)]
    seen: list[str] = []

    def look(row: Row, encoded: Encoded) -> None:
        assert encoded.input_ids or encoded.skipped
        seen.append(row.where)
        if row.where == f"{tmp_path}/b:2":
            raise DataError(f"{row.where}: not this")

    with pytest.raises(DataError, match="b:2: not this"):
        list(encode_chunks(read_chunks(sources), chatml, ENCODING, 1, look))
    assert seen == [f"{tmp_path}/a:{i}" for i in range(1, 129)] + [
        f"{tmp_path}/b:{i}" for i in (1, 2)
    ]


def test_progress_rises_to_1(tmp_path: Path, chatml: Any) -> None:
    sources = [write_rows(tmp_path / "a", 300), write_rows(tmp_path / "b", 300)]
    seen: list[tuple[int, float]] = []
    prepare_here(
        *sources, tokenizer=chatml, progress=lambda rows, share: seen.append((rows, share))
    )
    assert [rows for rows, _ in seen] == [128, 256, 300, 428, 556, 600]
    shares = [share for _, share in seen]
    assert shares == sorted(shares)
    assert shares[2] == pytest.approx(0.5)
    assert shares[0] == pytest.approx(128 / 600, abs=0.01)
    assert shares[-1] == 1


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, chatml: Any) -> None:
    source = write_rows(tmp_path / "a", 300)
    status = source.path.stat()

    def write(rows: int, share: float) -> None:
        del rows, share
        text = source.path.read_text()
        source.path.write_text(text.replace("what is 1", "WHAT is 1"))
        os.utime(source.path, ns=(status.st_atime_ns, status.st_mtime_ns))  # nothing shows

    with pytest.raises(DataError, match="a: changed while it was read"):
        prepare_here(source, tokenizer=chatml, progress=write)


def test_a_temporary_folder_that_is_full_is_one_clear_line(
    tmp_path: Path, chatml: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "TemporaryFile", open_full)
    with pytest.raises(DiskFullError, match=r"no room for the prepared rows.*set TMPDIR"):
        prepare_here(write_rows(tmp_path / "a", 3), tokenizer=chatml)


def test_prompts_that_texts_do_not_have_are_said(tmp_path: Path, chatml: Any) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "abc"}\n')
    chats = write_rows(tmp_path / "b.jsonl", 3)
    prompts = replace(ENCODING, train_on_prompt=True)

    def notes(*sources: SourceFile, encoding: Encoding = prompts) -> tuple[str, ...]:
        return prepare_here(*sources, tokenizer=chatml, encoding=encoding).summary.notes

    said = "data.train_on_prompt: has no effect on texts: they have no prompt"
    assert notes(SourceFile(path)) == (said,)
    assert notes(SourceFile(path), chats) == ()
    assert notes(SourceFile(path), encoding=ENCODING) == ()
    assert notes(SourceFile(path, "text")) == ()  # said as the config was read


def test_rows_of_a_hub_are_kept_nowhere(
    tmp_path: Path, chatml: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(hub: HubSet) -> Iterator[tuple[str, dict[str, object]]]:
        yield f"{hub.path}:1", {"text": "abc"}

    monkeypatch.setattr(source_module, "read_hub", read)
    source = SourceFile(Path("owner/name"), hub=HubSet("owner/name", None, "train", None, False))
    told: list[str] = []
    cache = tmp_path / "cache"
    found = prepare_here(source, tokenizer=chatml, cache_dir=cache, say=told.append)
    assert told == ["data.cache_dir: has no effect on data sets of a hub, which may change there"]
    assert len(found.examples) == 1
    assert found.contents == ((),)
    assert not (tmp_path / "cache").exists()


def test_auto_keeps_the_rows_of_large_files_alone(
    tmp_path: Path, chatml: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    source = write_rows(tmp_path / "a", 3)
    prepare_here(source, tokenizer=chatml, cache_dir="auto", workers="auto")
    assert not (tmp_path / "home").exists()
    monkeypatch.setattr(module, "SMALL_BYTES", source.path.stat().st_size)
    prepare_here(source, tokenizer=chatml, cache_dir="auto")
    assert (tmp_path / "home" / "megatrain" / "data").is_dir()


def test_auto_does_without_a_folder_that_cannot_be_written(
    tmp_path: Path, chatml: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(module, "SMALL_BYTES", 0)
    said: list[str] = []
    source = write_rows(tmp_path / "a", 3)
    found = prepare_here(source, tokenizer=chatml, cache_dir="auto", say=said.append)
    assert len(found.examples) == 3
    assert os.strerror(errno.ENOTDIR) in said[0]
    assert said[0].endswith("They are prepared at each start.")


def test_large_files_are_given_to_all_cores(
    tmp_path: Path, chatml: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def serial(chunks: Any, tokenizer: Any, encoding: Any, workers: int, look: Any) -> Any:
        asked.append(workers)
        return encode_chunks(chunks, tokenizer, encoding, 1, look)

    monkeypatch.setattr(module, "encode_chunks", serial)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(9)))
    monkeypatch.setattr(cgroup, "cpu_quota", lambda root, proc: None)
    source = write_rows(tmp_path / "a", 3)
    prepare_here(source, tokenizer=chatml, workers="auto")
    monkeypatch.setattr(module, "SMALL_BYTES", 0)
    prepare_here(source, tokenizer=chatml, workers="auto")
    prepare_here(source, tokenizer=chatml, workers=4)
    monkeypatch.setattr(cgroup, "cpu_quota", lambda root, proc: 2)  # as in a container
    prepare_here(source, tokenizer=chatml, workers="auto")
    assert asked == [1, 9, 4, 2]
