"""A tiny run that saves: three small files a step and a stand-in manifest, by the real protocol.

Free of torch, so that a process that does this starts at once.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import xxhash

from megatrain_cli.checkpoint.commit import write_checkpoint, write_latest
from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.checkpoint.remove import remove_checkpoint
from megatrain_cli.checkpoint.write import FileWriter, WrittenFile

FILES = ("model-embed.safetensors", "training/optim-embed.safetensors", "config.json")
PUBLISHED = re.compile(r"step-(\d{8})")


def contents(step: int, size: int) -> dict[str, bytes]:
    """What the files of a step hold: each step's differ from those before."""
    return {
        name: hashlib.shake_256(f"{step} {name}".encode()).digest(size + index)
        for index, name in enumerate(FILES)
    }


def manifest_of(step: int, files: list[WrittenFile]) -> bytes:
    """Sizes and hashes of all files, and a hash of itself."""
    text = json.dumps(
        {"step": step, "files": {file.name: [file.num_bytes, file.xxh3_128] for file in files}}
    )
    return json.dumps({"text": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}).encode()


State = Literal["whole", "torn", "no manifest"]


def state_of(step: int, files: Mapping[str, bytes]) -> State:
    """What a folder of that step is, by its manifest alone."""
    try:
        outer = json.loads(files["manifest.json"])
        text = outer["text"]
        if hashlib.sha256(text.encode()).hexdigest() != outer["sha256"]:
            return "no manifest"
    except (KeyError, ValueError, TypeError):
        return "no manifest"
    found = {
        name: [len(data), xxhash.xxh3_128_hexdigest(data)]
        for name, data in files.items()
        if name != "manifest.json"
    }
    return "whole" if json.loads(text) == {"step": step, "files": found} else "torn"


def checkpoints_in(tree: Mapping[str, bytes | None]) -> dict[int, State]:
    """Which steps have a folder by their final name, and what each is."""
    folders: dict[str, dict[str, bytes]] = {}
    for path, data in tree.items():
        if path.startswith("checkpoints/"):
            folder, _, name = path.removeprefix("checkpoints/").partition("/")
            files = folders.setdefault(folder, {})
            if name and data is not None:
                files[name] = data
    return {
        (step := int(match[1])): state_of(step, files)
        for folder, files in folders.items()
        if (match := PUBLISHED.fullmatch(folder))
    }


def fill(fs: FileSystem, folder: Path, step: int, size: int) -> bytes:
    """Write a step's files into a folder; the manifest that lists them."""
    writer = FileWriter(fs, chunk_bytes=4096)
    return manifest_of(
        step,
        [writer.write(folder / name, name, [data]) for name, data in contents(step, size).items()],
    )


def save(
    fs: FileSystem,
    checkpoints: Path,
    step: int,
    tell: Callable[[str, int], None],
    *,
    size: int = 40,
    keep: int = 1,
    atomic_rename: bool = True,
) -> None:
    """Save a step, point `latest.json` at it, and remove the older ones but `keep - 1`."""
    done = write_checkpoint(
        fs,
        checkpoints,
        step,
        lambda folder: fill(fs, folder, step, size),
        num_bytes=4 * size,
        atomic_rename=atomic_rename,
    )
    tell("committed", step)
    write_latest(fs, done.folder, f"sha256:{step}", attempt=1)
    names = sorted(path.name for path in checkpoints.glob("step-*"))
    for name in names[:-keep]:
        tell("retired", int(name.removeprefix("step-")))
        remove_checkpoint(fs, checkpoints / name)


def save_in_place(
    fs: FileSystem,
    checkpoints: Path,
    step: int,
    tell: Callable[[str, int], None],
    *,
    size: int = 40,
) -> None:
    """The usual way, as a warning: each file in its final folder, and nothing waited for."""
    folder = checkpoints / f"step-{step:08d}"
    for path in (checkpoints, folder, folder / "training"):
        if not fs.exists(path):
            fs.make_folder(path)
    files = contents(step, size)
    listed = [
        WrittenFile(name, len(data), xxhash.xxh3_128_hexdigest(data))
        for name, data in files.items()
    ]
    for name, data in {**files, "manifest.json": manifest_of(step, listed)}.items():
        fd = fs.create(folder / name, direct=False)
        for start in range(0, len(data), 4096):
            fs.write(fd, memoryview(data)[start : start + 4096], start)
        fs.close(fd)
    tell("committed", step)
