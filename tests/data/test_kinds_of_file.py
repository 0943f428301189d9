"""The same rows are the same, whatever kind of file they are in. Every cell of docs/data.md."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.config.schema import DataFormat
from megatrain_cli.data.formats import FORMATS, Row
from megatrain_cli.data.source import SourceFile, read_rows
from megatrain_cli.errors import DataError
from tests.data.kinds_of_file import KINDS, ODD, ROWS, Rows, write_kind

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
# Of those a cell can hold only text.
TEXT_ONLY = ("TXT", "TXT.gz")
ROW_KINDS = [kind for kind in KINDS if kind not in TEXT_ONLY]


def read(path: Path, row_format: str = "auto") -> list[Row]:
    return list(read_rows(SourceFile(path, row_format)))


def without_place(rows: list[Row]) -> list[Row]:
    return [replace(row, where="") for row in rows]


def reads(kind: str, row_format: str) -> bool:
    return row_format == "text" or kind not in TEXT_ONLY


def test_the_table_names_every_format_and_kind_and_says_what_is_read() -> None:
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    cells = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]
    start = next(i for i, row in enumerate(cells) if row[0] == "Format")
    head, body = cells[start], cells[start + 2 : start + 2 + len(FORMATS)]
    assert head[1:] == list(KINDS)
    assert [row[0] for row in body] == list(FORMATS)
    for row in body:
        said = dict(zip(head[1:], row[1:], strict=True))
        assert said == {kind: "yes" if reads(kind, row[0]) else "no" for kind in KINDS}


def test_the_config_and_the_tests_know_the_formats_of_the_code() -> None:
    assert DataFormat.__args__ == ("auto", *FORMATS)  # type: ignore[attr-defined]
    assert list(ROWS) == list(FORMATS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("row_format", FORMATS)
@pytest.mark.parametrize("asked", ["auto", "by name"])
def test_rows_of_every_format_are_the_same_from_every_kind_of_file(
    tmp_path: Path, kind: str, row_format: str, asked: str
) -> None:
    name = row_format if asked == "by name" else "auto"
    if not reads(kind, row_format):
        path = write_kind(tmp_path, kind, ROWS["text"])
        if asked == "by name":
            with pytest.raises(DataError, match=f"of text, but the file is read as {row_format}"):
                read(path, name)
        return
    rows = read(write_kind(tmp_path, kind, ROWS[row_format]), name)
    assert {row.format for row in rows} == {row_format}
    assert len(rows) == len(ROWS[row_format])
    oracle = read(write_kind(tmp_path, "JSONL", ROWS[row_format]))
    assert repr(without_place(rows)) == repr(without_place(oracle))
    assert all(re.search(rf"{KINDS[kind][0]}:\d+$", row.where) for row in rows)


# What a text may hold: no half of a surrogate pair, which JSON alone can spell.
# NUL is refused where it stands as a byte; JSON can spell it.
CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
TEXTS = st.text(CHARACTERS, max_size=6) | st.just(ODD)
TURNS = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"]), "content": TEXTS},
    optional={"name": TEXTS, "train": st.just(False)},
)
CHATS = st.lists(
    st.fixed_dictionaries(
        {"messages": st.lists(TURNS, min_size=1, max_size=3)},
        optional={"tools": st.just([{"name": "f"}])},
    ),
    min_size=1,
    max_size=4,
)
ALPACAS = st.lists(
    st.fixed_dictionaries(
        {"instruction": TEXTS, "output": TEXTS},
        optional={
            "input": TEXTS,
            "system": TEXTS | st.none(),
            "history": st.lists(st.tuples(TEXTS, TEXTS).map(list), max_size=2),
        },
    ),
    min_size=1,
    max_size=4,
)


@given(rows=CHATS | ALPACAS)
def test_any_rows_are_the_same_from_every_kind_of_file(
    rows: Rows, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("kinds")
    oracle = without_place(read(write_kind(folder, "JSONL", rows)))
    for kind in ROW_KINDS:
        assert without_place(read(write_kind(folder, kind, rows))) == oracle


def test_a_row_has_its_line_or_its_number_as_its_place(tmp_path: Path) -> None:
    rows = [{"text": "a\nb"}, {"text": "c"}, {"text": "d"}]
    places = {
        "JSONL": [1, 2, 3],
        "JSON": [2, 5, 8],
        "CSV": [2, 4, 5],
        "Parquet": [1, 2, 3],
        "Arrow file": [1, 2, 3],
        "Arrow stream": [1, 2, 3],
    }
    for kind, lines in places.items():
        found = read(write_kind(tmp_path, kind, rows))
        assert [int(row.where.rpartition(":")[2]) for row in found] == lines
