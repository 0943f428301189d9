"""Which files a source has and what they are; a damaged one is an error with its name."""

import builtins
import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from megatrain_cli.data import text_file
from megatrain_cli.data.source import SourceFile, parse_rows, read_rows
from megatrain_cli.errors import DataError, RowError
from tests.data.kinds_of_file import KINDS, ROWS, write_kind

Write = Callable[..., Path]


def texts(path: Path, **more: Any) -> list[str | None]:
    return [row.text for row in read_rows(SourceFile(path, **more))]


def refusal(path: Path, **more: Any) -> str:
    with pytest.raises(DataError) as caught:
        texts(path, **more)
    return str(caught.value)


def test_a_folder_is_all_data_files_below_it_in_the_order_of_their_names(tmp_path: Path) -> None:
    names = ["b.jsonl", "a/2.json", "a/10.jsonl.gz", "c/d/e.ndjson", ".hidden.jsonl", ".git/x.json"]
    names += ["dataset_info.json", "state.json", "README.md", "a/LICENSE"]
    for name in reversed(names):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        raw = b'{"text": "%s"}' % name.encode()
        path.write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    source = SourceFile(tmp_path)
    assert texts(tmp_path) == ["a/10.jsonl.gz", "a/2.json", "b.jsonl", "c/d/e.ndjson"]
    assert [path.name for path in source.files] == ["10.jsonl.gz", "2.json", "b.jsonl", "e.ndjson"]


def test_a_folder_without_data_or_with_several_kinds_is_refused(tmp_path: Path) -> None:
    assert "no data file in the folder (.jsonl" in refusal(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    (tmp_path / "readme.txt").write_text("not to be learnt")
    message = refusal(tmp_path)
    assert "several kinds" in message
    assert "a.jsonl and " in message
    assert "readme.txt" in message


def test_the_first_bytes_decide_over_the_name(tmp_path: Path) -> None:
    for kind in ("Parquet", "Arrow file", "Arrow stream", "JSONL.gz", "JSONL.zst"):
        path = tmp_path / "rows.jsonl"
        path.write_bytes(KINDS[kind][1](ROWS["text"]))
        assert len(texts(path)) == 3
    for name in ("a.parquet", "a.arrow"):
        (tmp_path / name).write_text('{"text": "a"}')
        assert "is no such file" in refusal(tmp_path / name)


@pytest.mark.parametrize("kind", ["Parquet", "Arrow file", "Arrow stream", "JSONL.gz", "JSONL.zst"])
def test_a_file_that_was_cut_off_or_damaged_is_an_error(tmp_path: Path, kind: str) -> None:
    rows = [{"text": f"{i} " + chr(65 + i % 26) * (i % 37)} for i in range(500)]
    path = write_kind(tmp_path, kind, rows)
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) // 2])
    message = refusal(path)
    assert path.name in message
    assert "damaged or cut off" in message


def test_a_damaged_middle_of_a_gzip_is_an_error(tmp_path: Path) -> None:
    path = write_kind(tmp_path, "JSONL.gz", [{"text": str(i)} for i in range(500)])
    raw = bytearray(path.read_bytes())
    raw[-6] ^= 1  # of the checksum
    path.write_bytes(raw)
    assert "damaged or cut off" in refusal(path)


def test_a_parquet_file_inside_gzip_is_refused_with_advice(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet.gz"
    path.write_bytes(gzip.compress(KINDS["Parquet"][1](ROWS["text"])))
    assert "Unpack it" in refusal(path)


@pytest.mark.parametrize(
    ("kind", "library", "extra"),
    [
        ("Parquet", "pyarrow", "data"),
        ("Arrow file", "pyarrow", "data"),
        ("JSONL.zst", "zstandard", "data"),
    ],
)
def test_a_library_that_is_missing_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, library: str, extra: str
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name.partition(".")[0] == library:
            raise ImportError(name)
        return real(name, *args)

    path = write_kind(tmp_path, kind, ROWS["text"])
    monkeypatch.setattr(builtins, "__import__", without)
    message = refusal(path)
    assert f"needs the library {library}" in message
    assert f"'megatrain[{extra}]'" in message


def test_rows_of_plain_text_are_lines_paragraphs_or_documents(write: Write) -> None:
    raw = b"\xef\xbb\xbfone\r\n two\r\n\r\n \t\nthree\xe2\x80\xa8\nfour"
    path = write(raw, "a.txt")
    assert texts(path) == ["one", " two", "three\u2028", "four"]
    assert texts(path, sample_by="paragraph") == ["one\n two", "three\u2028\nfour"]
    assert texts(path, sample_by="document") == ["one\n two\n\n \t\nthree\u2028\nfour"]
    assert texts(write(b"a\n", "b.txt"), sample_by="document") == ["a"]
    places = [row.where for row in read_rows(SourceFile(path, sample_by="paragraph"))]
    assert places == [f"{path}:1", f"{path}:5"]
    assert "a.txt:1: byte 2 is not UTF-8" in refusal(write(b"x\xe9\n", "a.txt"))


def test_a_text_without_an_end_is_refused(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_file, "MAX_ROW", 10)
    path = write(b"12345\n" * 3, "a.txt")
    assert texts(path) == ["12345"] * 3
    assert "a document is longer than" in refusal(path, sample_by="document")


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"text\na\nb,c\n", ":3: 2 cells in a row of a file with 1 column"),
        (b"text,input\na\n", ":2: 1 cell in a row of a file with 2 columns"),
        (b"text,text\na,b\n", ":1: the column 'text' is there twice"),
        (b'text\n"a\n', ":2: broken CSV: unexpected end of data"),
        (b'text\n"a"b\n', ":2: broken CSV"),
        (b"text\n\xe9\n", "not UTF-8"),
        (b"text\n", "the file has no rows"),
        (b"story\na\n", ":2: no column of a format that is known"),
    ],
)
def test_a_broken_csv_is_refused_with_its_line(write: Write, raw: bytes, reason: str) -> None:
    assert reason in refusal(write(raw, "a.csv"))


def test_a_csv_keeps_texts_as_they_are(write: Write) -> None:
    long = "x" * 200_000  # more than Python allows a cell at first
    path = write(f'\ufefftext\r\n007\r\n\r\n"a\r\nb"\r\n{long}\r\n'.encode(), "a.csv")
    assert texts(path) == ["007", "a\r\nb", long]


def test_max_rows_takes_the_first_over_all_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "{name}1"}}\n{{"text": "{name}2"}}\n')
    assert texts(tmp_path, max_rows=3) == ["a1", "a2", "b1"]
    assert texts(tmp_path, max_rows=9) == ["a1", "a2", "b1", "b2"]


def test_frames_of_zstd_follow_each_other(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.zst"
    frames = [zstandard.compress(b'{"text": "%d"}\n' % i) for i in range(3)]
    path.write_bytes(b"".join(frames))
    assert texts(path) == ["0", "1", "2"]
    path.write_bytes(frames[0] + frames[1][:-3])
    assert "it ends in the middle" in refusal(path)
    path.write_bytes(frames[0] + b"not zstd at all")
    assert "damaged or cut off" in refusal(path)


def test_a_column_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    doubled = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    with pa.ipc.new_stream(tmp_path / "a.arrow", doubled.schema) as writer:
        writer.write_table(doubled)
    assert "a.arrow: the column 'text' is there twice" in refusal(tmp_path / "a.arrow")


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_value_that_python_cannot_hold_is_the_fault_of_its_row(tmp_path: Path, kind: str) -> None:
    pairs = pa.list_(pa.map_(pa.string(), pa.string()))
    turn, doubled = [("role", "user"), ("content", "a")], [("role", "user"), ("role", "tool")]
    table = pa.table(
        {
            "messages": pa.array([[turn], [doubled], [turn], [turn]], pairs),
            "day": pa.array([0, 0, 2**30, 0], pa.date32()),
        }
    )
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)
    found = list(parse_rows(SourceFile(path)))
    assert [str(row) for row in found if isinstance(row, RowError)] == [
        f"{path}:2: messages: an object has the same key twice. Keep one.",
        f"{path}:3: day: a date or time that Python cannot hold. Take the column out.",
    ]
    assert [row.where for row in found] == [f"{path}:{number}" for number in (1, 2, 3, 4)]


def test_values_that_json_has_not_are_named_and_not_shown(tmp_path: Path) -> None:
    table = pa.table({"text": pa.array([b"secret"], pa.binary())})
    pq.write_table(table, tmp_path / "a.parquet")
    assert "a.parquet:1: text: bytes where text is expected" in refusal(tmp_path / "a.parquet")
    table = pa.table({"text": pa.array([0], pa.timestamp("s"))})
    pq.write_table(table, tmp_path / "a.parquet")
    assert "text: a value that is neither text, number" in refusal(tmp_path / "a.parquet")
