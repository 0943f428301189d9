"""Re-pack a checkpoint's weights as a plain model folder, for hubs and servers.

A checkpoint is a model folder already; an exported one has few files, the dtype that is asked for,
and nothing that only training needs.

The folder is written under a temporary name, synced, read again and compared, and renamed: one
with its final name is complete, and equal to the checkpoint after the cast.
"""

import errno
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatrain_cli.checkpoint.cast import CastWeight, cast_pieces, cast_weights
from megatrain_cli.checkpoint.folder import OpenCheckpoint
from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.checkpoint.hashes import check_files
from megatrain_cli.checkpoint.headers import INDEX_NAME, make_header
from megatrain_cli.checkpoint.names import TEMPORARY
from megatrain_cli.checkpoint.resolve import is_checkpoint
from megatrain_cli.checkpoint.storage import check_room, ensure_folder, make_nonce, storage_error
from megatrain_cli.checkpoint.tree import remove_tree
from megatrain_cli.errors import IncompatibleError, StorageError
from megatrain_cli.units import MIB

CARD_NAME = "README.md"
BASE_CARD_NAME = "README-base-model.md"

_TORCH_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
# Room that is left on the disk beside the export.
_RESERVE = 16 * MIB

# Compares what was written with what it was made from; raises if they differ.
Reread = Callable[[OpenCheckpoint, Path, Sequence[CastWeight]], None]


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        dtype: Of the weights, as config.json names it.
        files: Names of the weight files.
        num_bytes: Of all files.
    """

    folder: Path
    dtype: str
    files: tuple[str, ...]
    num_bytes: int


def export(
    checkpoint: OpenCheckpoint,
    target: Path,
    fs: FileSystem,
    *,
    dtype: str | None,
    max_file_bytes: int,
    card: Callable[[str], str],
    reread: Reread,
    threads: int,
) -> Exported:
    """Write a checkpoint's weights to a new model folder.

    Args:
        checkpoint: Open; every file that is read is verified first.
        target: Folder to make; must not exist.
        fs: Where to write.
        dtype: `BF16`, `F16` or `F32`; None keeps what is stored.
        max_file_bytes: Weights in one file; a single larger tensor has a file of its own.
        card: Makes the text of the README from the name of the dtype.
        reread: Called before the folder gets its name.
        threads: That hash at once.

    Raises:
        CorruptError: A file of the checkpoint is damaged.
        IncompatibleError: An update is pending, so the weights are of no one step.
        NumericsError: A value does not fit the dtype.
        StorageError: The target exists or lies in a checkpoint, the disk is full or refuses.
            Nothing is left behind.
    """
    manifest = checkpoint.manifest
    if manifest.pending is not None:
        raise IncompatibleError(
            f"{checkpoint.folder} was saved in the middle of step {manifest.pending.step}: its "
            "layers are not of one step. Let `megatrain resume` finish the step and save again."
        )
    weights = cast_weights(checkpoint, dtype or manifest.shards[0].weights.tensors[0].dtype)
    kind = _TORCH_NAMES[weights[0].dtype]
    files = cut_files(weights, max_file_bytes)
    aux = _aux_texts(checkpoint, kind, card(kind))
    if len(files) > 1:
        aux[INDEX_NAME] = _index(files)
    needed = sum(weight.num_bytes for weight in weights) + sum(map(len, aux.values()))
    _check_target(fs, target, needed + _RESERVE)
    read = {file for weight in weights for file in weight.files}
    for problem in check_files(checkpoint, read, threads):
        raise problem
    temporary = target.with_name(f"{TEMPORARY}{target.name}-{make_nonce()}")
    written = 0
    try:
        ensure_folder(fs, target.parent)
        fs.make_folder(temporary)
        for name, held in files.items():
            written += _write(fs, temporary / name, _contents(checkpoint, held))
        for name, raw in aux.items():
            written += _write(fs, temporary / name, [memoryview(raw)])
        fs.sync_folder(temporary)
        reread(checkpoint, temporary, weights)
        fs.rename_new(temporary, target)
        fs.sync_folder(target.parent)
    except BaseException as error:
        with suppress(OSError):  # what stays behind has a name that says it is unfinished
            remove_tree(fs, temporary)
        if isinstance(error, OSError):
            raise storage_error(fs, target, error, needed) from error
        raise
    return Exported(target, kind, tuple(files), written)


def cut_files(weights: Sequence[CastWeight], max_bytes: int) -> dict[str, list[CastWeight]]:
    """Weights in their order, as many to a file as fit, under the names that transformers uses."""
    groups: list[list[CastWeight]] = []
    room = 0
    for weight in weights:
        if not groups or weight.num_bytes > room:
            groups.append([])
            room = max_bytes
        groups[-1].append(weight)
        room -= weight.num_bytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    count = len(groups)
    return {
        f"model-{number:05d}-of-{count:05d}.safetensors": group
        for number, group in enumerate(groups, 1)
    }


def _contents(checkpoint: OpenCheckpoint, weights: Sequence[CastWeight]) -> Iterator[memoryview]:
    shapes = {weight.name: weight.place.shape for weight in weights}
    yield memoryview(make_header(weights[0].dtype, shapes))
    for weight in weights:
        for piece in cast_pieces(checkpoint, weight):
            yield piece.data.cast("B")


def _index(files: dict[str, list[CastWeight]]) -> bytes:
    total = sum(weight.num_bytes for held in files.values() for weight in held)
    places = {weight.name: name for name, held in files.items() for weight in held}
    return _json({"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))})


def _aux_texts(checkpoint: OpenCheckpoint, dtype: str, card: str) -> dict[str, bytes]:
    """Tokenizer, templates, licence as they are; config with its dtype; our card beside theirs."""
    found = {}
    names = [file.file for file in checkpoint.manifest.aux]
    for name in names:
        if name == INDEX_NAME or "/" in name or (name == BASE_CARD_NAME and CARD_NAME in names):
            continue
        found[BASE_CARD_NAME if name == CARD_NAME else name] = checkpoint.read_aux(name)
    found["config.json"] = _with_dtype(found["config.json"], dtype)
    return found | {CARD_NAME: card.encode()}


def _with_dtype(raw: bytes, dtype: str) -> bytes:
    config = json.loads(raw)
    if config.get("dtype", config.get("torch_dtype")) == dtype:
        return raw
    config.pop("torch_dtype", None)
    return _json(config | {"dtype": dtype})


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _check_target(fs: FileSystem, target: Path, needed: int) -> None:
    if fs.exists(target):
        raise StorageError(f"{target} is there already; nothing in it was changed. Name a new one.")
    for above in target.absolute().parents:
        if is_checkpoint(above, fs):
            raise StorageError(
                f"{target} would lie in the checkpoint {above}, and retention would remove it with "
                "that. Name a folder outside of it."
            )
    try:
        check_room(fs, target, needed)
    except OSError as error:
        raise storage_error(fs, target, error, needed) from error


def _write(fs: FileSystem, path: Path, chunks: Iterable[memoryview]) -> int:
    """Write a new file and wait until it is on the disk; its bytes leave the page cache."""
    fd = fs.create(path, direct=False)
    try:
        end = 0
        for chunk in chunks:
            done = 0
            while done < chunk.nbytes:
                taken = fs.write(fd, chunk[done:], end + done)
                if not taken:
                    raise OSError(errno.EIO, "the disk takes no more bytes", str(path))
                done += taken
            end += done
        fs.sync(fd)
        fs.drop_cache(fd, 0, end)
    finally:
        fs.close(fd)
    return end
