"""A saved folder is a plain Hugging Face folder with the store's weights, or it is not there."""

import json
import os
import resource
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from megatrain_cli.checkpoint.headers import INDEX_NAME
from megatrain_cli.checkpoint.model_folder import check_room, save_model_folder, weights_bytes
from megatrain_cli.errors import NumericsError, StorageError
from megatrain_cli.store.master import MasterStore
from tests.families import KINDS
from tests.train.workspace import load_whole, make_workspace, start

BF16 = ["model.dtype=bfloat16", "optimizer.master=fp32_split"]


@contextmanager
def loaded_store(
    folder: Path, kind: str = "llama", *, tied: bool = False, overrides: list[str] = BF16
) -> Iterator[tuple[MasterStore, Path]]:
    """A filled store, and the model folder it was filled from."""
    with start(make_workspace(folder, kind, tied=tied), overrides) as run:
        yield run.engine.store, folder / "model"


def left_behind(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_hugging_face_loads_the_folder_whole_and_with_the_same_weights(
    kind: str, tied: bool, tmp_path: Path
) -> None:
    target = tmp_path / "checkpoints" / "step-00000007"
    with loaded_store(tmp_path, kind, tied=tied) as (store, source):
        num_bytes = save_model_folder(store, source, target)
        params = load_whole(target)
        for tile in store.tiles:
            for entry in tile.layout.entries:
                param = params.pop(entry.param.name)
                assert param.dtype == torch.bfloat16
                assert torch.equal(param, tile.view(entry.param.name))
        assert not params
        assert num_bytes == weights_bytes(store)
    assert left_behind(target.parent) == ["step-00000007"]


def test_there_is_one_file_a_layer_and_an_index_of_all(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with loaded_store(tmp_path) as (store, source):
        save_model_folder(store, source, target)
        wanted = {
            entry.param.name: f"model-{tile.layout.layer.name}.safetensors"
            for tile in store.tiles
            for entry in tile.layout.entries
        }
        num_bytes = weights_bytes(store)
    index = json.loads((target / INDEX_NAME).read_text())
    assert index == {"metadata": {"total_size": num_bytes}, "weight_map": wanted}
    for name in set(wanted.values()):
        with safe_open(target / name, "pt") as file:
            assert set(file.keys()) == {key for key, at in wanted.items() if at == name}
            assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize(
    "overrides", [BF16, ["model.dtype=float32", "optimizer.master=fp32"]], ids=["BF16", "F32"]
)
def test_each_file_is_byte_for_byte_what_safetensors_writes(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatrain_cli.checkpoint.model_folder._PIECE", 100)
    with loaded_store(tmp_path, "gpt2", overrides=overrides) as (store, source):
        save_model_folder(store, source, tmp_path / "out")
        for tile in store.tiles:
            tensors = {name: tile.view(name) for name in tile.layout.by_name}
            save_file(tensors, tmp_path / "reference", metadata={"format": "pt"})
            written = tmp_path / "out" / f"model-{tile.layout.layer.name}.safetensors"
            assert written.read_bytes() == (tmp_path / "reference").read_bytes()


# In a process of its own: the peak of this one would hide it.
PEAK = """
    import resource, sys
    from pathlib import Path
    import torch
    from megatrain_cli.checkpoint.model_folder import save_model_folder
    from megatrain_cli.model.layout import make_layout
    from megatrain_cli.model.spec import LayerSpec, ParamSpec
    from megatrain_cli.plan.tiles import TileFormat
    from megatrain_cli.store.master import MasterStore

    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    layer = LayerSpec("embed", "k", (ParamSpec("weight", (100_000, 1000)),))
    fmt = TileFormat("bfloat16", "bf16", keep_gradient=False)
    store = MasterStore((make_layout(layer),), fmt)
    store.tiles[0].weights.fill_(1.5)
    before = peak()
    save_model_folder(store, Path(sys.argv[1]), Path(sys.argv[2]))
    print(peak() - before)
"""


@pytest.mark.slow
def test_saving_a_large_layer_holds_no_copy_of_it(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text('{"dtype": "bfloat16"}')
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PEAK), tmp_path / "source", tmp_path / "out"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert (tmp_path / "out" / "model-embed.safetensors").stat().st_size > 200_000_000
    # A layer of 200 MB; looked at in pieces of 8 MiB, with some temporaries of that size.
    assert int(run.stdout) < 64 << 20


def test_every_file_but_weights_and_config_is_copied_byte_for_byte(tmp_path: Path) -> None:
    with loaded_store(tmp_path) as (store, source):
        (source / "LICENSE").write_bytes(b"\xff\x00 as it is\r\n")
        (source / "pytorch_model.bin").write_bytes(b"weights of another kind")
        (source / "pytorch_model.bin.index.json").write_text("{}")
        (source / "original").mkdir()
        save_model_folder(store, source, tmp_path / "out")
    copied = {"LICENSE", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    copied |= {"chat_template.jinja"}
    for name in copied:
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    weights = {path.name for path in (tmp_path / "out").glob("model-*.safetensors")}
    assert set(left_behind(tmp_path / "out")) == {*copied, *weights, INDEX_NAME, "config.json"}


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_config_says_the_dtype_that_was_written_and_nothing_else_changes(
    key: str, tmp_path: Path
) -> None:
    with loaded_store(tmp_path) as (store, source):
        config = json.loads((source / "config.json").read_text())
        config.pop("dtype", None)
        config |= {key: "float32", "a field nobody knows": [1, {"é": None}]}
        (source / "config.json").write_text(json.dumps(config))
        save_model_folder(store, source, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    del config[key]
    assert written == config | {"dtype": "bfloat16"}


def test_a_config_that_is_right_already_is_copied_byte_for_byte(tmp_path: Path) -> None:
    fp32 = ["model.dtype=float32", "optimizer.master=fp32"]
    with loaded_store(tmp_path, overrides=fp32) as (store, source):
        text = (source / "config.json").read_text().replace("{", "{ ", 1)
        (source / "config.json").write_text(text)
        save_model_folder(store, source, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_text() == text


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_never_written(value: float, tmp_path: Path) -> None:
    with loaded_store(tmp_path) as (store, source):
        store.tiles[-1].view("lm_head.weight")[3, 2] = value
        with pytest.raises(NumericsError, match=r"lm_head\.weight has values that are not finite"):
            save_model_folder(store, source, tmp_path / "runs" / "out")
    assert left_behind(tmp_path / "runs") == []


@contextmanager
def files_no_larger_than(num_bytes: int) -> Iterator[None]:
    """The kernel refuses larger ones with EFBIG: a failing disk without one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("limit", [100, 6000, 10_000], ids=["header", "weights", "licence"])
def test_a_disk_that_refuses_in_the_middle_leaves_nothing_half_written(
    limit: int, tmp_path: Path
) -> None:
    target = tmp_path / "runs" / "out"
    with loaded_store(tmp_path) as (store, source):
        (source / "LICENSE").write_bytes(bytes(20_000))
        with files_no_larger_than(limit), pytest.raises(StorageError, match="File too large"):
            save_model_folder(store, source, target)
        assert left_behind(tmp_path / "runs") == []
        save_model_folder(store, source, target)
    assert left_behind(tmp_path / "runs") == ["out"]


def test_an_interrupt_at_any_file_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with loaded_store(tmp_path) as (store, source), pytest.raises(KeyboardInterrupt):
        save_model_folder(store, source, tmp_path / "runs" / "out")
    assert left_behind(tmp_path / "runs") == []


def test_a_folder_that_is_there_already_is_not_touched(tmp_path: Path) -> None:
    target = tmp_path / "runs" / "out"
    target.mkdir(parents=True)
    (target / "mine").write_text("keep")
    with loaded_store(tmp_path) as (store, source), pytest.raises(StorageError, match="not empty"):
        save_model_folder(store, source, target)
    assert left_behind(tmp_path / "runs") == ["out"]
    assert left_behind(target) == ["mine"]


def test_too_little_room_is_said_with_both_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil._ntuple_diskusage(10**9, 10**9 - 2048, 2048)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    check_room(tmp_path / "new", 2048)
    with pytest.raises(StorageError, match=r"has 2\.00 KiB free and the weights need 2\.00 KiB"):
        check_room(tmp_path / "new", 2049)
    assert left_behind(tmp_path / "new") == []


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        check_room(tmp_path / "file" / "run", 1)
    assert os.listdir(tmp_path) == ["file"]  # noqa: PTH208  hidden files too
