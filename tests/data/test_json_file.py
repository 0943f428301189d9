"""Arrays are read through a window: its size changes nothing, and bounds what is held."""

import io
import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatrain_cli.data import json_file
from megatrain_cli.data.json_file import read_json
from megatrain_cli.errors import DataError
from megatrain_cli.units import MIB

VALUES = st.lists(
    st.dictionaries(st.text(max_size=3), st.text(max_size=5) | st.integers() | st.none()),
    max_size=4,
)


class Endless(io.RawIOBase):
    """An array of equal rows, made as it is read."""

    def __init__(self, row: bytes, count: int) -> None:
        self._row, self._left, self._rest = row + b",\n", count, b"[\n"

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while len(self._rest) < len(buffer) and self._left:
            self._left -= 1
            self._rest += self._row if self._left else self._row.removesuffix(b",\n") + b"]"
        part, self._rest = self._rest[: len(buffer)], self._rest[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)


@given(values=VALUES, window=st.integers(1, 9), indent=st.sampled_from([None, 0, 2]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_window_gives_the_rows_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, values: list[dict[str, Any]], window: int, indent: int | None
) -> None:
    text = json.dumps(values, ensure_ascii=False, indent=indent)
    text = "[\n" + text.removeprefix("[")  # the first line is read whole, so it is made short
    raw = text.encode(errors="surrogatepass")
    try:
        raw.decode()
    except UnicodeDecodeError:
        return
    monkeypatch.setattr(json_file, "_WINDOW", window)
    found = list(read_json(io.BytesIO(raw), "f"))
    assert [value for _, value in found] == values
    monkeypatch.setattr(json_file, "_WINDOW", MIB)
    assert list(read_json(io.BytesIO(raw), "f")) == found, "places too"


@pytest.mark.parametrize("window", [1, 2, 3, 7, MIB])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'[\n{"a": 1},\n{"a" 1}]', "f:3: element 2: broken JSON: Expecting ':' delimiter"),
        (b'[\n{"a": 1}\n{"a": 1}]', "f:2: element 1: neither a comma"),
        (b'[\n{"a": 1},\n{"a": "', "f:3: element 2: broken JSON: Unterminated string"),
        (b'[\n{"a": 1}', "f:2: element 1: neither a comma"),
        (b'[\n{"a": 1}]\n\n {}', "f:4: more text follows the end of the array"),
        (b'[\n{"a": 1},\n{"b": "\xe9"}]', "f:3: a byte that is not UTF-8"),
        (b'[\n{"a": 1, "a": 2}]', "f:2: element 1: an object has the same key twice"),
    ],
)
def test_a_broken_array_names_the_same_place_through_any_window(
    monkeypatch: pytest.MonkeyPatch, window: int, text: bytes, message: str
) -> None:
    monkeypatch.setattr(json_file, "_WINDOW", window)
    with pytest.raises(DataError) as caught:
        list(read_json(io.BytesIO(text), "f"))
    assert message in str(caught.value)


def test_an_array_is_never_held_as_a_whole() -> None:
    row = json.dumps({"text": "x" * 100_000}).encode()
    file = io.BufferedReader(Endless(row, 300))
    tracemalloc.start()
    count = sum(1 for _ in read_json(file, "f"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 300
    assert peak < 10 * MIB < 300 * len(row)


def test_a_line_that_never_ends_is_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_file, "MAX_ROW", 100)
    with pytest.raises(DataError, match="f:1: no line ends within"):
        list(read_json(io.BytesIO(b'{"a": "' + b"x" * 200), "f"))
    with pytest.raises(DataError, match="f:1: element 1: broken JSON"):
        list(read_json(io.BytesIO(b'[{"a": "' + b"x" * 999), "f"))
    assert list(read_json(io.BytesIO(b"[" + b'{"a": "\xc3\xa9"},' * 50 + b"{}]"), "f"))[49] == (
        "f:1",
        {"a": "é"},
    )
