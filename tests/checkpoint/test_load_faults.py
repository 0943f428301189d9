"""No damaged, foreign or unreadable byte of a checkpoint is ever computed with."""

import errno
import os
import threading
from pathlib import Path

import pytest
import torch

from megatrain_cli.checkpoint import layer_writer
from megatrain_cli.errors import CorruptError, IncompatibleError, NumericsError
from megatrain_cli.model.layout import LayerLayout
from megatrain_cli.plan.tiles import TileFormat
from megatrain_cli.store.master import MasterStore
from tests.checkpoint.loading import ReadDisk, load, loading
from tests.checkpoint.tiles import (
    FORMATS,
    LAYOUTS,
    SPLIT,
    bits,
    fill_gradients,
    layer,
    make_store,
    manifest_of,
    save,
)


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 0x10
    path.write_bytes(raw)


@pytest.mark.parametrize("where", ["length", "header", "first", "middle", "last"])
@pytest.mark.parametrize("part", ["weights", "optim", "grads"])
def test_a_flipped_byte_anywhere_stops_whoever_waits_for_that_layer(
    part: str, where: str, tmp_path: Path
) -> None:
    source = make_store()
    fill_gradients(source, 1)
    folder = save(source, tmp_path, 0, pending=1)
    entry = next(p for p in manifest_of(folder).shards[2].parts if p.part == part)
    at = {
        "length": 3,
        "header": entry.data_start // 2,
        "first": entry.data_start,
        "middle": (entry.data_start + entry.bytes) // 2,
        "last": entry.bytes - 1,
    }[where]
    flip(folder / entry.file, at)
    store = MasterStore(LAYOUTS, SPLIT)
    with loading(folder, store) as loader:
        loader.start()
        with pytest.raises(CorruptError) as found:
            store.clock.wait_for_state(2)
        with pytest.raises(CorruptError) as again:
            loader.wait()
    assert again.value is found.value
    assert entry.file in str(found.value)
    if where in ("first", "middle", "last"):
        assert f"the manifest says {entry.xxh3_128}" in str(found.value)
        assert "shard layer-00001" in str(found.value)
    if part == "weights":
        assert not store.clock._weights_there[2]
    assert not store.clock._state_there[2]
    with pytest.raises(CorruptError):
        store.clock.begin_update(2)


def test_a_file_of_another_checkpoint_is_refused_and_says_where_it_is_from(tmp_path: Path) -> None:
    one = save(make_store(), tmp_path / "one", 0)
    later = make_store(seed=1)
    later.clock.set_steps((7,) * 4)
    two = save(later, tmp_path / "two", 7)
    name = "training/optim-layer-00000.safetensors"
    (one / name).write_bytes((two / name).read_bytes())
    with pytest.raises(CorruptError, match=r"of another checkpoint.*step 7") as found:
        load(one, MasterStore(LAYOUTS, SPLIT))
    assert name in str(found.value)


def test_two_layers_files_that_were_swapped_are_told_by_their_names(tmp_path: Path) -> None:
    folder = save(make_store(), tmp_path, 0)
    one, two = (folder / f"model-layer-0000{i}.safetensors" for i in range(2))
    raw = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(raw)
    with pytest.raises(CorruptError, match=r"its header has 'layer-0000\d\.up'"):
        load(folder, MasterStore(LAYOUTS, SPLIT))


def test_a_missing_file_is_found_before_anything_is_read(tmp_path: Path) -> None:
    folder = save(make_store(), tmp_path, 0)
    (folder / "training/optim-head.safetensors").unlink()
    with pytest.raises(CorruptError, match=r"optim-head\.safetensors: missing"):
        load(folder, MasterStore(LAYOUTS, SPLIT))


def in_payload(name: str, offset: int) -> bool:
    loads = threading.current_thread().name.startswith("load")
    return loads and name == "training/optim-head.safetensors" and offset > 0


def test_a_disk_that_cannot_be_read_names_file_and_byte(tmp_path: Path) -> None:
    folder = save(make_store(), tmp_path, 0)

    def broken(name: str, offset: int, buffer: memoryview) -> None:
        if in_payload(name, offset):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    store = MasterStore(LAYOUTS, SPLIT)
    message = r"optim-head\.safetensors: cannot be read at byte \d+: Input/output error"
    with pytest.raises(CorruptError, match=message) as found:
        load(folder, store, ReadDisk(broken))
    assert isinstance(found.value.__cause__, OSError)
    with pytest.raises(CorruptError, match=message):
        store.clock.wait_for_state(3)


def test_a_file_that_gets_shorter_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    folder = save(make_store(), tmp_path, 0)

    def cut(name: str, offset: int, buffer: memoryview) -> None:
        if in_payload(name, offset):
            os.truncate(folder / name, offset)

    with pytest.raises(CorruptError, match=r"optim-head\.safetensors: truncated while it was read"):
        load(folder, MasterStore(LAYOUTS, SPLIT), ReadDisk(cut))


def test_after_a_broken_checkpoint_another_can_be_loaded_into_the_same_store(
    tmp_path: Path,
) -> None:
    good = save(make_store(seed=1), tmp_path / "good", 0)
    bad = save(make_store(), tmp_path / "bad", 0)
    flip(bad / "training/optim-layer-00001.safetensors", -1)
    store = MasterStore(LAYOUTS, SPLIT)
    with pytest.raises(CorruptError):
        load(bad, store)
    load(good, store)
    assert bits(store) == bits(make_store(seed=1))


@pytest.mark.parametrize(
    ("fmt", "layouts", "message"),
    [
        (SPLIT, LAYOUTS[:3], "has 4 layers, embed to head, and the model 3"),
        (FORMATS[1], LAYOUTS, r"optim-embed.safetensors has 3 tensors"),
        (FORMATS[4], LAYOUTS, r"embed.weight BF16 \[41, 33\], where .* embed.weight F32"),
        (
            SPLIT,
            (layer("embed", weight=(33, 41)), *LAYOUTS[1:]),
            r"embed.weight BF16 \[41, 33\], where .* \[33, 41\]",
        ),
    ],
    ids=["layers", "master", "dtype", "shape"],
)
def test_another_model_or_dtype_is_refused_before_anything_is_read(
    fmt: TileFormat, layouts: tuple[LayerLayout, ...], message: str, tmp_path: Path
) -> None:
    folder = save(make_store(), tmp_path, 0)
    store = MasterStore(layouts, fmt)
    with pytest.raises(IncompatibleError, match=message):
        load(folder, store)
    assert store.clock.loaded  # as it was


def test_a_pending_gradient_needs_a_store_that_keeps_gradients(tmp_path: Path) -> None:
    source = make_store()
    fill_gradients(source, 1)
    folder = save(source, tmp_path, 0, pending=1)
    eager = TileFormat("bfloat16", "fp32_split", keep_gradient=False)
    with pytest.raises(IncompatibleError, match="update: deferred"):
        load(folder, MasterStore(LAYOUTS, eager))


def test_weights_that_are_not_finite_are_refused_before_they_are_used_unless_forced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F56: no version of ours saves such a checkpoint; others may."""
    source = make_store()
    source.tiles[2].weights[5] = torch.inf
    with monkeypatch.context() as patch:
        patch.setattr(layer_writer, "check_finite", lambda tile, advice: None)
        folder = save(source, tmp_path, 0)
    store = MasterStore(LAYOUTS, SPLIT)
    with loading(folder, store, finite=True) as loader:
        loader.start()
        with pytest.raises(NumericsError, match=r"not finite.*--force"):
            store.clock.wait_for_weights(2)
    named = load(folder, store, finite=False).not_finite
    assert store.tiles[2].weights[5] == torch.inf
    assert named == (store.tiles[2].layout.entries[0].param.name,)


def test_who_forces_weights_that_are_all_finite_can_tell(tmp_path: Path) -> None:
    folder = save(make_store(), tmp_path, 0)
    assert load(folder, MasterStore(LAYOUTS, SPLIT), finite=False).not_finite == ()
