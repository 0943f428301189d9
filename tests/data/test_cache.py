"""Prepared rows on the disk: whole or not there, whoever dies, and never those of other data."""

import errno
import fcntl
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from megatrain_cli.data import cache as cache_module
from megatrain_cli.data.cache import Cache, CacheEntry
from megatrain_cli.data.prepare import Prepared
from megatrain_cli.data.source import SourceFile
from megatrain_cli.errors import CorruptError, DataError, DiskFullError, StorageError
from tests.data.preparing import Kept, content, open_full, prepare_here
from tests.train.killed import Killed


def test_rows_are_tokenised_once(kept: Kept) -> None:
    first = kept.prepare()
    second = kept.prepare()
    assert kept.made == 1
    assert content(first) == content(second)
    assert (first.summary, first.rows_xxh3_128) == (second.summary, second.rows_xxh3_128)
    assert first.contents == second.contents
    assert [line.split(":")[0].split("/")[0] for line in kept.said] == [
        "prepared rows are kept in ",
        "rows were prepared before",
    ]
    assert not any(a.flags.writeable for a in (second.examples.tokens, second.examples.offsets))


def test_a_file_that_was_touched_or_moved_is_the_same_and_is_named_as_it_is_now(
    kept: Kept, tmp_path: Path
) -> None:
    kept.prepare()
    moved = tmp_path / "elsewhere.jsonl"
    kept.source.path.rename(moved)
    os.utime(moved, (1, 1))
    found = kept.prepare(SourceFile(moved))
    assert kept.made == 1
    assert f"{moved}: read as alpaca" in found.summary.lines()
    assert f"{moved}:7" in "\n".join(found.summary.lines())
    assert "a.jsonl" not in "\n".join(found.summary.lines())


def flip(path: Path, at: int) -> None:
    damaged = bytearray(path.read_bytes())
    damaged[at] ^= 1
    path.write_bytes(damaged)


@pytest.mark.parametrize("name", ["tokens", "is_target", "offsets", "files", "lines", "rows.json"])
@pytest.mark.parametrize("how", ["first", "last", "cut", "gone", "empty"])
def test_damage_is_found_and_the_rows_are_prepared_again(name: str, how: str, kept: Kept) -> None:
    good = content(kept.prepare())
    [entry] = kept.entries
    path = entry / name
    if how in ("first", "last"):
        flip(path, 0 if how == "first" else -1)
    elif how == "gone":
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size - 1 if how == "cut" else 0)
    again = kept.prepare()
    assert kept.made == 2
    assert content(again) == good
    assert any("The rows are prepared again." in line for line in kept.said)
    assert content(kept.prepare()) == good
    assert kept.made == 2
    assert kept.entries == [entry]


def test_without_the_hash_damage_is_trained_on(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    prepared = kept.prepare()
    good, digest = content(prepared), prepared.rows_xxh3_128
    [entry] = kept.entries
    flip(entry / "tokens", 0)
    monkeypatch.setattr(cache_module, "hash_rows", lambda examples: digest)
    assert content(kept.prepare()) != good


def test_rows_that_another_process_makes_are_waited_for(kept: Kept) -> None:
    cache = Cache(kept.folder)
    kept.prepare()
    [entry] = kept.entries
    hidden = kept.folder.parent / "hidden"
    entry.rename(hidden)
    waiting = threading.Event()

    def hear(text: str) -> None:
        kept.said.append(text)
        if "waiting for it" in text:
            waiting.set()

    with cache.lock(entry.name, kept.said.append):
        other = threading.Thread(target=lambda: kept.prepare(say=hear))
        other.start()
        assert waiting.wait(60)
        hidden.rename(entry)
    other.join(60)
    assert not other.is_alive()
    assert kept.made == 1
    assert kept.said[-1].startswith("rows were prepared meanwhile")


def no_lock(file: Any, how: int) -> None:
    raise OSError(errno.ENOLCK, "no locks", how)


def test_without_locks_the_first_folder_stays(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", no_lock)
    inner: list[Prepared] = []

    def meanwhile(rows: int, share: float) -> None:
        del rows, share
        if not inner:
            inner.append(kept.prepare())

    outer = kept.prepare(progress=meanwhile)
    assert kept.made == 2
    assert content(outer) == content(inner[0])
    assert len(kept.entries) == 1
    assert content(kept.prepare()) == content(outer)
    assert kept.made == 2


def test_a_damaged_folder_may_be_removed_by_two(kept: Kept) -> None:
    kept.prepare()
    [entry] = kept.entries
    cache = Cache(kept.folder)
    cache.remove(entry.name)
    cache.remove(entry.name)
    assert kept.entries == []


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_death_at_any_moment_leaves_whole_rows_or_none(
    call: str, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = content(prepare_here(kept.source, tokenizer=kept.tokenizer))
    owner: Any = {"fsync": os, "rename": Path}[call]
    real = getattr(owner, call)
    deaths = 0
    for lifetime in range(20):
        left = [lifetime]

        def mortal(*args: Any, left: list[int] = left) -> Any:
            if not left[0]:
                raise Killed
            left[0] -= 1
            return real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(owner, call, mortal)
            patch.setattr(shutil, "rmtree", lambda *args, **more: None)  # nor is anything tidied up
            try:
                kept.prepare()
            except Killed:
                deaths += 1
            else:
                break
        before = kept.made
        found = kept.prepare()
        assert content(found) == good
        # Dead after the rename, the rows were whole; before, there were none.
        assert kept.made - before in (0, 1)
        assert len(kept.entries) == 1  # what the dead one left was removed
        shutil.rmtree(kept.entries[0])
    assert deaths == (8 if call == "fsync" else 1)


def test_a_full_disk_is_one_clear_line_and_leaves_nothing(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CacheEntry, "open_file", open_full)
    with pytest.raises(DiskFullError, match=r"cache: no room for .*is free\). Make room, or set"):
        kept.prepare()
    assert kept.entries == []


def test_a_disk_that_fills_at_the_last_moment_leaves_nothing(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, target: Path) -> Path:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), str(path), None, str(target))

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(DiskFullError, match="Disk quota exceeded"):
        kept.prepare()
    assert kept.entries == []


def test_a_folder_that_cannot_be_written_is_one_clear_line(kept: Kept, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        StorageError, match=r"Not a directory\. Make room, or set `data\.cache_dir`"
    ):
        kept.prepare(cache_dir=tmp_path / "file" / "cache")


def test_how_much_is_free_need_not_be_known(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "full")
    with (
        pytest.raises(DiskFullError, match="an unknown amount is free"),
        cache_module.disk_errors(tmp_path / "none"),
    ):
        raise full


def test_an_error_in_the_data_leaves_nothing(kept: Kept) -> None:
    with pytest.raises(DataError, match="no such file"):
        kept.prepare(SourceFile(kept.folder / "none"))
    empty = kept.folder.parent / "empty.jsonl"
    empty.write_text('{"instruction": "a", "output": ""}\n')
    with pytest.raises(DataError, match="no row has anything to learn"):
        kept.prepare(SourceFile(empty))
    assert kept.entries == []


def test_a_folder_closed_to_us_counts_as_damaged(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    kept.prepare()
    [entry] = kept.entries
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(CorruptError, match="cannot be read: Permission denied"):
        Cache(kept.folder).open(entry.name, ["a"])
