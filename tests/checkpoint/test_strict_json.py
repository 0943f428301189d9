"""Canonical JSON: one spelling a value, and nothing else is read."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.checkpoint.strict_json import MAX_BYTES, MAX_DEPTH, canonical, parse
from megatrain_cli.errors import CorruptError

leaves = st.none() | st.booleans() | st.integers() | st.text()
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(values)
def test_a_value_reads_back_and_any_other_spelling_is_refused(value: object) -> None:
    raw = canonical(value)
    assert parse(raw, "x") == value
    for other in (raw + b"\n", b" " + raw, json.dumps(value, indent=1).encode() + b" "):
        with pytest.raises(CorruptError, match="x: changed after it was written"):
            parse(other, "x")


@pytest.mark.parametrize(
    "text",
    ["", "{", "1.5", "1e3", "NaN", "-Infinity", "-0", '{"a":1,"a":1}', '{"b":1,"a":1}', '"\u00e9"',
     '"\\u0041"', "[" * 100_000, "1" * 10_000, '{"a":' * 17 + "1" + "}" * 17],
)  # fmt: skip
def test_what_is_not_canonical_is_refused(text: str) -> None:
    with pytest.raises(CorruptError, match="x: "):
        parse(text.encode(), "x")


def test_bytes_that_are_no_text_are_refused() -> None:
    with pytest.raises(CorruptError, match="torn or damaged"):
        parse(b'"\xff\xfe"', "x")


def test_the_deepest_value_is_read_and_one_deeper_is_not() -> None:
    deep = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH
    assert canonical(parse(deep, "x")) == deep
    with pytest.raises(CorruptError, match=f"nested deeper than {MAX_DEPTH}"):
        parse(b"[" + deep + b"]", "x")


def test_too_long_a_text_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "loads", pytest.fail)
    with pytest.raises(CorruptError, match=r"64\.0 MiB, more than"):
        parse(bytes(MAX_BYTES + 1), "x")
    with pytest.raises(CorruptError, match="12,000,000 values"):
        parse(b"," * 12_000_001, "x")


@pytest.mark.parametrize("value", [1.0, [float("nan")], {"a": [0.1]}, {1: 2}, {"a": {None: 1}}])
def test_what_has_no_spelling_is_not_written(value: object) -> None:
    with pytest.raises(TypeError, match=r"float|not a string"):
        canonical(value)
