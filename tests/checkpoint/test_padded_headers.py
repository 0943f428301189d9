"""Heads of shards: the reference library reads them, and they read back as they were made."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from megatrain_cli.checkpoint.headers import make_padded_header, parse_header, read_header
from megatrain_cli.checkpoint.places import ITEM_BYTES, TensorPlace
from megatrain_cli.errors import CorruptError

NUMPY = {"F32": "float32", "I16": "int16", "U8": "uint8", "F64": "float64"}
names = st.text(st.characters(codec="utf-8"), min_size=1).filter(lambda n: n != "__metadata__")
metadata = st.dictionaries(names, st.text(st.characters(codec="utf-8")), max_size=3)
tensors = st.dictionaries(
    names,
    st.tuples(
        st.sampled_from([*NUMPY, "BF16"]), st.lists(st.integers(0, 4), max_size=3).map(tuple)
    ),
    max_size=5,
)


def place(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> list[TensorPlace]:
    places, end = [], 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
        places.append(TensorPlace(name, dtype, shape, start, end))
    return places


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tensors, metadata)
def test_a_padded_head_reads_back_and_the_reference_library_agrees(
    tmp_path: Path, tensors: dict[str, tuple[str, tuple[int, ...]]], metadata: dict[str, str]
) -> None:
    places = place(tensors)
    head = make_padded_header(places, metadata)
    assert len(head) % 4096 == 0
    payload = bytes(index % 251 for index in range(places[-1].end if places else 0))
    size = len(head) + len(payload)
    read = parse_header(head, size, "x")
    assert read.tensors == tuple(sorted(places, key=lambda one: (one.start, one.end)))
    assert read.metadata == {"format": "pt"} | metadata
    assert read.data_start == len(head)
    path = tmp_path / "x.safetensors"
    path.write_bytes(head + payload)
    assert list(read_header(path)) == [one.name for one in read.tensors]
    with safe_open(path, "numpy") as file:
        assert set(file.keys()) == set(tensors)
        assert file.metadata() == {"format": "pt"} | metadata
        for one in places:
            if one.dtype in NUMPY:
                found = file.get_tensor(one.name)
                assert found.dtype == np.dtype(NUMPY[one.dtype])
                assert found.shape == one.shape
                assert found.tobytes() == payload[one.start : one.end]


def test_tensors_with_a_gap_or_a_reserved_name_make_no_head() -> None:
    gap = [TensorPlace("a", "U8", (1,), 0, 1), TensorPlace("b", "U8", (1,), 2, 3)]
    with pytest.raises(ValueError, match="'b' begins at byte 2, wanted 1"):
        make_padded_header(gap, {})
    with pytest.raises(ValueError, match="is reserved"):
        make_padded_header([TensorPlace("__metadata__", "U8", (1,), 0, 1)], {})


def test_a_head_that_was_not_read_whole_is_refused() -> None:
    head = make_padded_header([TensorPlace("a", "U8", (1,), 0, 1)], {})
    for length in (0, 7, 8, 100):
        with pytest.raises(CorruptError, match="x: "):
            parse_header(head[:length], len(head) + 1, "x")


@pytest.mark.parametrize("text", [b'{"__metadata__":{"a":1}}', b'{"__metadata__":[]}'])
def test_metadata_that_is_no_text_is_refused(text: bytes) -> None:
    raw = len(text).to_bytes(8, "little") + text
    with pytest.raises(CorruptError, match="__metadata__ is not a mapping of texts"):
        parse_header(raw, len(raw), "x")
