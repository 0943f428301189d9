"""Safetensors headers: equal to what the reference library wrote; any damage is named."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from megatrain_cli.checkpoint.headers import (
    INDEX_NAME,
    find_model_folder,
    make_header,
    read_folder,
    read_header,
)
from megatrain_cli.errors import CorruptError

arrays = st.builds(
    lambda shape, dtype: np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype),
    st.lists(st.integers(0, 4), max_size=3),
    st.sampled_from(["float32", "float16", "int64", "uint8", "bool"]),
)


def write(path: Path, **shapes: tuple[int, ...]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {name: np.zeros(shape, "float32") for name, shape in shapes.items()}
    save_file(arrays, path, {"format": "pt"})
    return path


def write_raw(path: Path, header: object, num_bytes: int = 0) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(num_bytes))
    return path


def entry(shape: list[object], offsets: list[object], dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.text(st.characters(codec="utf-8"), min_size=1), arrays, max_size=4))
def test_the_bytes_of_each_tensor_are_where_the_header_says(
    tmp_path: Path, tensors: dict[str, "np.ndarray[tuple[int, ...], np.dtype[np.generic]]"]
) -> None:
    tensors.pop("__metadata__", None)
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    raw = path.read_bytes()
    header = read_header(path)
    assert header.keys() == tensors.keys()
    for name, one in header.items():
        assert one.shape == tensors[name].shape
        assert raw[one.start : one.end] == tensors[name].tobytes()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8"), min_size=1).filter(lambda n: n != "__metadata__"),
        st.lists(st.integers(0, 4), max_size=3).map(tuple),
        max_size=4,
    )
)
def test_a_header_is_byte_for_byte_the_reference_librarys(
    tmp_path: Path, shapes: dict[str, tuple[int, ...]]
) -> None:
    path = write(tmp_path / "model.safetensors", **shapes)
    head = make_header("F32", dict(sorted(shapes.items())))
    num_bytes = sum(4 * int(np.prod(shape)) for shape in shapes.values())
    assert path.read_bytes() == head + bytes(num_bytes)
    assert len(head) % 8 == 0


def test_every_truncation_is_found(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", a=(3,), b=(2, 2))
    raw = path.read_bytes()
    for length in range(len(raw)):
        path.write_bytes(raw[:length])
        with pytest.raises(CorruptError, match=r"m\.safetensors: "):
            read_header(path)
    path.write_bytes(raw + b"x")
    with pytest.raises(CorruptError, match="too long"):
        read_header(path)


@pytest.mark.parametrize(
    ("header", "num_bytes"),
    [
        (b"{", 0),
        (b"[]", 0),
        (b"\xff\xff", 0),
        (b'{"a": 1, "a": 2}', 0),
        ({"a": 1}, 0),
        ({"a": entry([1], [0, 4], "F33")}, 4),
        ({"a": entry([1], [0, 5])}, 5),
        ({"a": entry([-1], [0, -4])}, 0),
        ({"a": entry([True], [0, 4])}, 4),
        ({"a": entry([1], [0])}, 4),
        ({"a": entry([1.0], [0, 4])}, 4),
        ({"a": {"dtype": "F32", "shape": [1]}}, 4),
        ({"a": entry([1], [0, 4]), "b": entry([1], [0, 4])}, 4),
        ({"a": entry([1], [4, 8])}, 8),
        ({"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}, 4),
    ],
)
def test_a_damaged_header_names_the_file(tmp_path: Path, header: object, num_bytes: int) -> None:
    with pytest.raises(CorruptError, match=r"m\.safetensors: "):
        read_header(write_raw(tmp_path / "m.safetensors", header, num_bytes))


def test_a_damaged_length_does_not_read_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes((2**63).to_bytes(8, "little") + bytes(100))
    with pytest.raises(CorruptError, match="truncated or damaged"):
        read_header(path)


def model_folder(folder: Path) -> Path:
    write(folder / "model-00001-of-00002.safetensors", a=(3,), b=(2, 2))
    write(folder / "model-00002-of-00002.safetensors", c=(5,))
    (folder / "config.json").write_text("{}")
    index = {"a": 1, "b": 1, "c": 2}
    weight_map = {name: f"model-0000{n}-of-00002.safetensors" for name, n in index.items()}
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_a_whole_folder_is_read_file_by_file(tmp_path: Path) -> None:
    first, second = read_folder(model_folder(tmp_path))
    assert (first.num_parameters, second.num_parameters) == (7, 5)
    assert first.dtypes == ("F32",)
    assert second.num_bytes == (tmp_path / second.name).stat().st_size


def test_files_that_the_index_does_not_name_are_no_part_of_the_model(tmp_path: Path) -> None:
    write(model_folder(tmp_path) / "model-00003-of-00003.safetensors", old=(9,))
    assert len(read_folder(tmp_path)) == 2


def test_a_missing_file_or_tensor_is_named(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    write(folder / "model-00001-of-00002.safetensors", a=(3,))
    with pytest.raises(CorruptError, match=r"00001-of-00002\.safetensors: b is missing"):
        read_folder(folder)
    write(folder / "model-00001-of-00002.safetensors", a=(3,), b=(2,), d=(1,))
    with pytest.raises(CorruptError, match=r"d is not in model\.safetensors\.index\.json"):
        read_folder(folder)
    (folder / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(CorruptError, match=r"00001-of-00002\.safetensors: missing"):
        read_folder(folder)


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": "../x"}}', '{"weight_map": 3}'],
)
def test_a_damaged_index_is_named(tmp_path: Path, text: str) -> None:
    (model_folder(tmp_path) / INDEX_NAME).write_text(text)
    with pytest.raises(CorruptError, match="not a weight index"):
        read_folder(tmp_path)


def test_the_newest_finished_folder_is_found(tmp_path: Path) -> None:
    assert find_model_folder(tmp_path) is None
    old = model_folder(tmp_path / "checkpoints" / "step-00000001")
    new = model_folder(tmp_path / "checkpoints" / "step-00000002")
    for name in (".tmp-step-00000003-ab", ".trash-step-00000001-cd"):
        model_folder(tmp_path / "checkpoints" / name)
    os.utime(old / "config.json", (1, 1))
    os.utime(new / "config.json", (2, 2))
    assert find_model_folder(tmp_path) == new
    assert find_model_folder(old) == old
