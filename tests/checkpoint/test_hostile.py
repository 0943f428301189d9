"""Hostile and damaged bytes: refused by one of our errors, with bounded memory, whatever they are.

`CI=1` runs 100,000 cases; without it there are a tenth of them. F44.
"""

import json
import os
import random
import tracemalloc
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from megatrain_cli.checkpoint.headers import make_padded_header, parse_header, read_header
from megatrain_cli.checkpoint.manifest import Manifest
from megatrain_cli.checkpoint.places import TensorPlace
from megatrain_cli.errors import CorruptError, IncompatibleError, MegatrainError
from tests.checkpoint.made import make_checkpoint, random_layers
from tests.checkpoint.signed import sign

CASES = 100_000 if os.environ.get("CI") else 10_000

TOKENS = [
    b"", b"[", b"]", b"{", b"}", b",", b":", b'"', b"0", b"-1", b"1e9", b"NaN", b"Infinity",
    b"null", b"true", b"\\u0000", b"\\ud800", b"\xff", b"\x00", b"..", b"/", b"9" * 40,
    b"1.5", b"[" * 30, b'{"a":' * 30, b'"a":1,"a":2', b"\x1b[2J",
]  # fmt: skip
VALUES: list[Any] = [
    None, True, -1, 0, 1 << 63, 1 << 200, "", "..", "../x", "/x", "a\x00b", "\x1b[2J", "\ud800",
    [], [[]], {}, {"a": {}}, "x" * 300, [1 << 62] * 20, "model-x.safetensors", "F32", "BF16",
]  # fmt: skip

HEAD = make_padded_header(
    [
        TensorPlace("model.a", "BF16", (3, 4), 0, 24),
        TensorPlace("model.b", "F32", (2,), 24, 32),
        TensorPlace("model.c", "I16", (), 32, 34),
    ],
    {"megatrain.step": "3"},
)
SIZE = len(HEAD) + 34


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("x") / "c"
    return make_checkpoint(folder, random_layers(layers=0), pending=1).to_bytes()


def mutate(raw: bytes, draw: random.Random) -> bytes:
    """Flip, cut, repeat, insert or replace, one to three times."""
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(raw) + 1)
        end = min(len(raw), at + draw.choice((0, 1, 1, 2, 8, 40)))
        middle = draw.choice((draw.choice(TOKENS), raw[at:end] * 2, bytes([draw.randrange(256)])))
        raw = raw[:at] + middle + raw[end:]
    return raw


def change_somewhere(value: Any, draw: random.Random) -> None:
    """Replace, drop or add one value anywhere in a JSON value."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys:
            return
        key = draw.choice(keys)
        if isinstance(value[key], (dict, list)) and value[key] and draw.random() < 0.8:
            value = value[key]
            continue
        match draw.randrange(3):
            case 0:
                value[key] = deepcopy(draw.choice(VALUES))
            case 1:
                del value[key]
            case _ if isinstance(value, dict):
                key = draw.choice(("zz", "file", "step", "pending"))
                value[key] = deepcopy(draw.choice(VALUES))
            case _:
                value.append(deepcopy(value[key]))
        return


def survive(read: Callable[[bytes, int], object], cases: list[bytes], size: int) -> int:
    """How many of the cases were refused; any other exception than ours fails the test."""
    errors: list[MegatrainError] = []
    for raw in cases:
        try:
            read(raw, size)
        except MegatrainError as error:
            errors.append(error)
    assert {type(error) for error in errors} <= {CorruptError, IncompatibleError}
    assert all(str(error).isprintable() and len(str(error)) < 1000 for error in errors)
    return len(errors)


def as_header(raw: bytes, size: int) -> None:
    header = parse_header(raw, size, "x")
    assert sum(place.end - place.start for place in header.tensors) == size - header.data_start


def as_manifest(raw: bytes, _: int) -> None:
    assert Manifest.from_bytes(raw, "x").to_bytes() == raw


@pytest.mark.no_cover
def test_mutated_headers_are_refused_or_describe_the_file() -> None:
    draw = random.Random(1)
    text = HEAD[8:].rstrip(b" ")
    cases = []
    for _ in range(CASES // 2):
        changed = mutate(text, draw)
        if draw.random() < 0.1:  # the length too
            changed = changed[: draw.randrange(len(changed) + 1)]
            cases.append(draw.randbytes(8) + changed)
        else:
            cases.append((SIZE - 34 - 8).to_bytes(8, "little") + changed.ljust(SIZE - 42))
    refused = survive(as_header, cases, SIZE)
    assert refused > 0.6 * len(cases)


@pytest.mark.no_cover
def test_mutated_manifests_are_refused(manifest: bytes) -> None:
    draw = random.Random(2)
    cases = [mutate(manifest, draw) for _ in range(CASES * 4 // 10)]
    same = sum(case == manifest for case in cases)
    assert survive(as_manifest, cases, 0) == len(cases) - same


@pytest.mark.no_cover
def test_changed_manifests_with_a_fitting_hash_are_refused_or_read_back(manifest: bytes) -> None:
    draw = random.Random(3)
    cases = []
    for _ in range(CASES // 10):
        value = json.loads(manifest)
        for _ in range(draw.choice((1, 1, 2, 3))):
            change_somewhere(value, draw)
        cases.append(sign(value))
    refused = survive(as_manifest, cases, 0)
    assert 0.2 * len(cases) < refused < len(cases)


def peak_bytes(read: Callable[[], object], match: str) -> int:
    tracemalloc.start()
    try:
        with pytest.raises(CorruptError, match=match):
            read()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("length", [1 << 63, (1 << 64) - 1, 1 << 40, 100_000_001])
def test_a_huge_header_is_not_read(tmp_path: Path, length: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(length.to_bytes(8, "little"))
    os.truncate(path, 1 << 41)  # a hole: the length alone would be possible
    assert peak_bytes(lambda: read_header(path), "a header of") < 1 << 20


def test_more_values_than_memory_should_hold_are_not_parsed(manifest: bytes) -> None:
    many = b'{"a":[' + b"[]," * 6_000_001 + b"[]]}"
    raw = len(many).to_bytes(8, "little") + many
    size = len(raw)
    assert peak_bytes(lambda: parse_header(raw, size, "x"), "12,000,000 values") < 2 * len(raw)
    assert peak_bytes(lambda: Manifest.from_bytes(many), "12,000,000 values") < 1 << 20


@pytest.mark.parametrize(
    "text",
    [b"[" * 1_000_000, b'{"a":' * 200_000, b'{"a":[' + b"1" * 5000 + b"]}"],
)
def test_json_that_is_deep_or_long_in_a_number_is_refused(text: bytes) -> None:
    raw = len(text).to_bytes(8, "little") + text
    assert peak_bytes(lambda: parse_header(raw, len(raw), "x"), "damaged header") < 16 << 20
    assert peak_bytes(lambda: Manifest.from_bytes(text), "torn or damaged") < 16 << 20


def test_shapes_that_overflow_any_machine_number_are_refused() -> None:
    for shape in ([1 << 32, 1 << 32], [(1 << 64) + 6], [1 << 62] * 16, [2] * 1000, [0] * 17):
        text = json.dumps({"a": {"dtype": "U8", "shape": shape, "data_offsets": [0, 0]}}).encode()
        raw = len(text).to_bytes(8, "little") + text
        with pytest.raises(CorruptError, match=r"no possible shape|needs"):
            parse_header(raw, len(raw), "x")
