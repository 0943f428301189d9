"""`--diff`: equal checkpoints have no difference; one flipped bit is one element of one tensor."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain_cli.checkpoint import pieces as pieces_module
from megatrain_cli.checkpoint.diff import Difference, TensorDiff, compare
from megatrain_cli.checkpoint.folder import open_checkpoint
from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.errors import CorruptError
from tests.checkpoint.made import make_checkpoint, random_layers


def diff(left: Path, right: Path) -> Difference:
    with (
        open_checkpoint(left, FileSystem()) as one,
        open_checkpoint(right, FileSystem()) as other,
    ):
        return compare(one, other, threads=2)


def test_equal_state_is_equal_whoever_saved_it(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "a", pending=1)
    make_checkpoint(tmp_path / "b", pending=1, attempt=4, run_id="another")
    found = diff(tmp_path / "a", tmp_path / "b")
    assert found.is_empty
    assert found.compared == sum(1 for _ in every_place(tmp_path / "a"))


def test_a_damaged_file_without_tensors_is_no_equal_one(tmp_path: Path) -> None:
    """Of these the manifests' hashes are compared, so each has to be what its manifest says."""
    for name in ("a", "b"):
        make_checkpoint(tmp_path / name, aux={"training/plan.json": b"{}"})
    (tmp_path / "b" / "training" / "plan.json").write_bytes(b"[]")
    with pytest.raises(CorruptError, match=r"b/training/plan\.json: damaged"):
        diff(tmp_path / "a", tmp_path / "b")


def every_place(folder: Path) -> list[tuple[str, tuple[int, ...], str, int, int]]:
    with open_checkpoint(folder, FileSystem()) as checkpoint:
        return [
            (place.name, place.shape, part.file, part.data_start + place.start, place.end)
            for part in checkpoint.manifest.parts
            for place in part.tensors
        ]


@settings(max_examples=60)
@given(st.data())
def test_one_flipped_bit_names_exactly_that_tensor_and_element(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / "diff-of-one-bit"
    if not folder.exists():
        make_checkpoint(folder / "a", pending=1)
        shutil.copytree(folder / "a", folder / "b")
    places = every_place(folder / "a")
    name, shape, file, start, _ = data.draw(st.sampled_from(places))
    index = data.draw(st.integers(0, int(np.prod(shape)) - 1))
    width = 2 if name.startswith(("model.", "lm_head", "master_lo.", "grad.")) else 4
    byte = data.draw(st.integers(0, width - 1))
    path = folder / "b" / file
    raw = bytearray(path.read_bytes())
    raw[start + index * width + byte] ^= 1 << data.draw(st.integers(0, 7))
    before = path.read_bytes()
    path.write_bytes(raw)
    try:
        found = diff(folder / "a", folder / "b")
    finally:
        path.write_bytes(before)
    first = tuple(map(int, np.unravel_index(index, shape)))
    assert found.tensors == (TensorDiff(name, int(np.prod(shape)), 1, first),)
    assert not found.is_empty
    assert (found.only_left, found.only_right, found.reshaped, found.facts) == ((), (), (), ())


def test_all_differing_elements_are_counted_across_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces_module, "PIECE", 7)
    layers = random_layers()
    make_checkpoint(tmp_path / "a", layers, master="bf16")
    layers["embed"]["model.embed_tokens.weight"].reshape(-1)[[20, 50, 127]] += 1
    make_checkpoint(tmp_path / "b", layers, master="bf16")
    found = {one.name: one for one in diff(tmp_path / "a", tmp_path / "b").tensors}
    name = "model.embed_tokens.weight"
    assert found[name] == TensorDiff(name, 128, 3, (2, 4))
    assert found.keys() == {name, f"exp_avg.{name}", f"exp_avg_sq.{name}"}


def test_names_and_forms_that_only_one_has_are_told(tmp_path: Path) -> None:
    layers = random_layers()
    make_checkpoint(tmp_path / "a", layers, master="fp32")
    norm = layers["head"].pop("model.norm.weight")
    layers["head"]["model.norm.scale"] = norm
    make_checkpoint(tmp_path / "b", layers, weights="F32", master="fp32")
    found = diff(tmp_path / "a", tmp_path / "b")
    assert "model.norm.weight" in found.only_left
    assert "master.lm_head.weight" in found.only_left
    assert "model.norm.scale" in found.only_right
    assert ("lm_head.weight", "BF16 [16, 8]", "F32 [16, 8]") in found.reshaped


def test_facts_and_files_that_differ_are_told_by_key(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "a", aux={"tokenizer.json": b"1", "LICENSE": b""})
    make_checkpoint(
        tmp_path / "b", aux={"tokenizer.json": b"2"}, losses_tail=((2.0).hex(),), target_steps=30
    )
    found = diff(tmp_path / "a", tmp_path / "b")
    assert found.tensors == ()
    assert found.facts == (
        ("losses_tail", [(2.5).hex(), (2.25).hex()], [(2.0).hex()]),
        ("target_steps", 20, 30),
    )
    assert found.aux == ("LICENSE", "tokenizer.json")
    assert found.to_json()["equal"] is False
