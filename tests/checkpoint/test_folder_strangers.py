"""Files that do not belong into a checkpoint, and an index that leads out of it."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from megatrain_cli.checkpoint.folder import open_checkpoint
from megatrain_cli.checkpoint.headers import INDEX_NAME
from megatrain_cli.checkpoint.verify import check_part
from megatrain_cli.errors import CorruptError, NoCheckpointError
from tests.checkpoint.made import make_checkpoint, random_layers
from tests.checkpoint.opening import FS, OPTIM, WEIGHTS, refused

_opened: list[str] = []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path / "c", random_layers(layers=1), aux={"training/plan.json": b"{}"})
    return tmp_path / "c"


@pytest.mark.parametrize("name", ["model-x.safetensors", "training/x.safetensors", "X.SafeTensors"])
def test_an_unknown_shard_is_an_error(folder: Path, name: str) -> None:  # F38
    (folder / name).write_bytes(b"")
    refused(folder, CorruptError, f"'{name}' is no part of this checkpoint")


def test_other_unknown_files_are_noted_and_a_keep_file_is_not(folder: Path) -> None:  # F38
    for name in ("KEEP", "notes.txt", "training/.DS_Store", "a\x1b[2Jb"):
        (folder / name).write_bytes(b"")
    (folder / "more").mkdir()
    with open_checkpoint(folder, FS) as checkpoint:
        notes = checkpoint.notes
    assert [note.split(" is not")[0] for note in notes] == [
        r"'a\x1b[2Jb'", "'more'", "'notes.txt'", "'training/.DS_Store'",
    ]  # fmt: skip


def do_harm(name: str) -> None:
    _opened.append(name)


class Harm:
    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return do_harm, ("a pickle",)


def test_pickles_in_the_folder_are_never_opened(folder: Path) -> None:  # F50
    for name in ("optimizer.pt", "pytorch_model.bin", "training/rng.pth"):
        (folder / name).write_bytes(pickle.dumps(Harm()))
    with open_checkpoint(folder, FS) as checkpoint:
        for part in checkpoint.manifest.parts:
            check_part(checkpoint, part)
        assert len(checkpoint.notes) == 3
    assert _opened == []


def test_a_pickle_in_place_of_a_shard_is_bytes_with_a_wrong_hash(folder: Path) -> None:  # F50
    raw = pickle.dumps(Harm())
    path = folder / OPTIM
    path.write_bytes(raw + bytes(path.stat().st_size - len(raw)))
    with open_checkpoint(folder, FS) as checkpoint, pytest.raises(CorruptError, match=OPTIM):
        check_part(checkpoint, checkpoint.manifest.shards[0].parts[1])
    assert _opened == []


def test_the_watch_for_pickles_sees_one() -> None:  # the two tests above can fail
    pickle.loads(pickle.dumps(Harm()))
    assert _opened == ["a pickle"]
    _opened.clear()


def test_a_pickle_is_no_checkpoint(tmp_path: Path) -> None:  # F50
    (tmp_path / "model.pt").write_bytes(pickle.dumps({}))
    refused(tmp_path / "model.pt", NoCheckpointError, "not a megatrain checkpoint")


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("../model-embed.safetensors", "no plain name"),
        ("/model-embed.safetensors", "no plain name"),
        ("..", "no plain name"),
        ("", "no plain name"),
        ("model-other.safetensors", "the manifest says 'model-embed.safetensors'"),
        ("model-head.safetensors", "the manifest says 'model-embed.safetensors'"),
        (None, "no plain name"),
    ],
)
def test_an_index_that_leads_elsewhere_is_refused(
    tmp_path: Path, file: str | None, reason: str
) -> None:
    layers = random_layers(layers=0)
    plain = {"model.norm.weight": "model-head.safetensors"}
    plain |= {"lm_head.weight": "model-head.safetensors"}
    index = {"weight_map": plain | {"model.embed_tokens.weight": file}}
    make_checkpoint(tmp_path / "c", layers, aux={INDEX_NAME: json.dumps(index).encode()})
    refused(tmp_path / "c", CorruptError, f"{INDEX_NAME}: .*{reason}")


def test_an_index_of_too_few_or_many_tensors_is_refused(tmp_path: Path) -> None:
    layers = random_layers(layers=0)
    plain = {"model.embed_tokens.weight": WEIGHTS, "model.norm.weight": "model-head.safetensors"}
    for number, more in enumerate(({}, {"lm_head.weight": "model-head.safetensors", "x": WEIGHTS})):
        aux = {INDEX_NAME: json.dumps({"weight_map": plain | more}).encode()}
        make_checkpoint(tmp_path / f"{number}", layers, aux=aux)
        refused(tmp_path / f"{number}", CorruptError, "None")


def test_a_damaged_index_or_aux_file_is_found_by_its_hash(folder: Path) -> None:
    raw = (folder / "config.json").read_bytes()
    (folder / "config.json").write_bytes(b"[]"[: len(raw)])
    with (
        open_checkpoint(folder, FS) as checkpoint,
        pytest.raises(CorruptError, match=r"config\.json: damaged: its xxh3-128 is"),
    ):
        checkpoint.read_aux("config.json")
    index = bytearray((folder / INDEX_NAME).read_bytes())
    index[5] ^= 1
    (folder / INDEX_NAME).write_bytes(index)
    refused(folder, CorruptError, f"{INDEX_NAME}: damaged")
