"""Writes the same rows as every kind of file, and rows of every format to write."""

import csv
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

Rows = list[dict[str, Any]]

CALL = {"type": "function", "function": {"name": "f", "arguments": {"city": "Oslo"}}}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "a, b"}}]
ODD = 'a "quoted", \u2028 line\r\nand\nmore \U0001f600 \x85 é'

ROWS: dict[str, Rows] = {
    "alpaca": [
        {"instruction": "a", "output": "b"},
        {"instruction": ODD, "input": "x", "output": ODD, "system": "s"},
        {"instruction": "c", "input": "", "output": "", "history": [["q", "r"], ["q2", ODD]]},
    ],
    "sharegpt": [
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": ODD}]},
        {
            "conversations": [
                {"from": "system", "value": "s"},
                {"from": "human", "value": "weather?"},
                {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
                {"from": "observation", "value": "SECRET42"},
                {"from": "gpt", "value": "dry", "train": False},
            ],
            "tools": TOOLS,
        },
        {"conversations": [{"from": "gpt", "value": "first"}], "system": "s"},
    ],
    "messages": [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ODD}]},
        {
            "messages": [
                {"role": "developer", "content": "s"},
                {"role": "user", "content": ""},
                {"role": "user", "content": "again"},
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "content": "SECRET42", "name": "f"},
                {"role": "assistant", "content": "dry", "train": False},
                {"role": "assistant", "content": "wet", "weight": 1},
            ],
            "tools": TOOLS,
        },
    ],
    "prompt_completion": [
        {"prompt": "a", "completion": "b"},
        {"prompt": ODD, "completion": ODD, "system": "s"},
    ],
    "text": [{"text": "a"}, {"text": "b, c \u2028 d \U0001f600"}, {"text": "  e"}],
    "tokenized": [
        {"input_ids": [1, 2, 3]},
        {"input_ids": [4, 5], "labels": [-100, 5], "attention_mask": [1, 1]},
    ],
}


def _jsonl(rows: Rows) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def _json(rows: Rows) -> bytes:
    return json.dumps(rows, ensure_ascii=False, indent=1).encode()


def columns(rows: Rows) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _csv(rows: Rows) -> bytes:
    file = io.StringIO(newline="")
    table = csv.writer(file)
    table.writerow(columns(rows))
    for row in rows:
        cells = [row.get(name) for name in columns(rows)]
        table.writerow([json.dumps(cell) if isinstance(cell, list) else cell for cell in cells])
    return file.getvalue().encode()


def table(rows: Rows) -> pa.Table:
    return pa.table({name: [row.get(name) for row in rows] for name in columns(rows)})


def _parquet(rows: Rows) -> bytes:
    file = io.BytesIO()
    pq.write_table(table(rows), file, row_group_size=2)
    return file.getvalue()


def _arrow(new: Callable[[io.BytesIO, pa.Schema], Any]) -> Callable[[Rows], bytes]:
    def write(rows: Rows) -> bytes:
        file = io.BytesIO()
        found = table(rows)
        with new(file, found.schema) as writer:
            writer.write_table(found, max_chunksize=2)
        return file.getvalue()

    return write


def _txt(rows: Rows) -> bytes:
    return "".join(row["text"] + "\n" for row in rows).encode()


def _gz(write: Callable[[Rows], bytes]) -> Callable[[Rows], bytes]:
    return lambda rows: gzip.compress(write(rows), mtime=0)


def _zst(write: Callable[[Rows], bytes]) -> Callable[[Rows], bytes]:
    return lambda rows: zstandard.compress(write(rows))


# The columns of the table in docs/data.md: its heading -> the name of a file, and how it is made.
KINDS: dict[str, tuple[str, Callable[[Rows], bytes]]] = {
    "JSONL": ("rows.jsonl", _jsonl),
    "JSON": ("rows.json", _json),
    "CSV": ("rows.csv", _csv),
    "Parquet": ("rows.parquet", _parquet),
    "Arrow file": ("rows.arrow", _arrow(pa.ipc.new_file)),
    "Arrow stream": ("rows.arrow", _arrow(pa.ipc.new_stream)),
    "TXT": ("rows.txt", _txt),
    "JSONL.gz": ("rows.jsonl.gz", _gz(_jsonl)),
    "JSON.gz": ("rows.json.gz", _gz(_json)),
    "CSV.gz": ("rows.csv.gz", _gz(_csv)),
    "TXT.gz": ("rows.txt.gz", _gz(_txt)),
    "JSONL.zst": ("rows.jsonl.zst", _zst(_jsonl)),
}


def write_kind(folder: Path, kind: str, rows: Rows) -> Path:
    name, make = KINDS[kind]
    path = folder / name
    path.write_bytes(make(rows))
    return path
