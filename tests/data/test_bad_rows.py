"""Rows that cannot be used stop the run, or are all accounted for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatrain_cli.data.bad_rows import BadRows, merge_bad_rows
from megatrain_cli.data.source import SourceFile, read_rows
from megatrain_cli.errors import DataError, RowError

Write = Callable[..., Path]
GOOD = {"instruction": "a", "output": "b"}


def ten(write: Write) -> Path:
    rows: list[Any] = [GOOD] * 5
    rows[2:2] = [{**GOOD, "output": {"k": 1}}, {**GOOD, "output": 5}]
    rows += [{**GOOD, "output": {"k": 2}}, {**GOOD, "output": 6}, {**GOOD, "output": {"k": 3}}]
    return write(rows)


def test_the_first_bad_row_is_an_error_unless_skipping_is_asked_for(write: Write) -> None:
    path = ten(write)
    with pytest.raises(RowError) as caught:
        list(read_rows(SourceFile(path)))
    assert (caught.value.where, caught.value.reason) == (
        f"{path}:3",
        "output: an object where text is expected",
    )


def test_skipped_rows_are_counted_by_reason_with_their_first_places(write: Write) -> None:
    path = ten(write)
    bad = BadRows("skip", limit=0.5)
    rows = list(read_rows(SourceFile(path), bad))
    assert (bad.num_read, len(rows), bad.num_bad) == (10, 5, 5)
    assert bad.lines() == [
        f"skipped 3: output: an object where text is expected ({path}:3, {path}:8, {path}:10)",
        f"skipped 2: output: a number where text is expected ({path}:4, {path}:9)",
    ]


def test_more_than_the_limit_is_an_error_with_the_whole_account(write: Write) -> None:
    with pytest.raises(DataError) as caught:
        list(read_rows(SourceFile(ten(write)), BadRows("skip", limit=0.49)))
    first, *reasons = str(caught.value).splitlines()
    assert first.startswith("5 of 10 rows cannot be used, more than `data.max_bad_share: 0.49`")
    assert len(reasons) == 2


def test_a_hopeless_file_is_not_read_to_its_end(write: Write) -> None:
    path = write(b"{\n" * 5000)
    bad = BadRows("skip", limit=0.05)
    with pytest.raises(DataError, match=r"51 of 51 rows cannot be used"):
        list(read_rows(SourceFile(path), bad))


def test_broken_lines_cells_and_bytes_are_rows_that_can_be_skipped(write: Write) -> None:
    broken = b'{"text": \n[1]\n{"text": "\xe9"}\n{"text": "b"} x\n'
    lines = write(b'{"text": "a"}\n' + broken + b'{"text": "c"}\n')
    bad = BadRows("skip", limit=1)
    assert [row.text for row in read_rows(SourceFile(lines), bad)] == ["a", "c"]
    assert list(bad.skipped) == [
        "broken JSON: Expecting value",
        "a list where an object is expected",
        "byte N is not UTF-8. Save the file as UTF-8.",
        "more text follows the end of the object",
    ]
    table = write(b"text\na\nb,c\nd\n", "a.csv")
    bad = BadRows("skip", limit=1)
    assert [row.text for row in read_rows(SourceFile(table), bad)] == ["a", "d"]


def test_what_breaks_a_whole_file_is_never_skipped(write: Write) -> None:
    for content in (b'[{"text": "a"}, {"text" 1}]', b'[{"text": "a"}'):
        with pytest.raises(DataError):
            list(read_rows(SourceFile(write(content)), BadRows("skip", limit=1)))


def test_reasons_that_differ_in_a_place_or_a_word_are_one(write: Write) -> None:
    def turn(role: str) -> dict[str, str]:
        return {"role": role, "content": "x"}

    path = write(
        [{"messages": [turn("user"), turn(f"it's {i}" if i % 2 else f"{i}")]} for i in range(4)]
    )
    bad = BadRows("skip", limit=1)
    assert list(read_rows(SourceFile(path), bad)) == []
    [reason] = bad.skipped
    assert reason.startswith("messages[...].role: ")
    assert bad.skipped[reason].count == 4
    assert bad.lines()[0].endswith(f"({path}:1, {path}:2, {path}:3, ...)")


def test_accounts_of_sources_add_up() -> None:
    first, second = BadRows("skip", limit=1), BadRows("skip", limit=1)
    for bad, places in ((first, "ab"), (second, "cde")):
        for place in places:
            bad.num_read += 1
            bad.add(RowError(place, "r"))
    merged = merge_bad_rows([first, second])
    assert (merged["r"].count, merged["r"].places) == (5, ("a", "b", "c"))
