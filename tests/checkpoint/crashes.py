"""What a disk may hold after a crash: a model of a file system that keeps only what was synced.

A run on the real file system is recorded as a log. The log is replayed up to each point; from
there, whatever was not synced may be lost, in any combination: a file's bytes may be missing,
half there, or zeros; a name may not have been made, moved or removed yet. That is less than any
file system in use promises (after Pillai et al., "All File Systems Are Not Created Equal", OSDI
2014), except for one thing taken for granted: a rename within a folder is seen whole or not at all.
"""

import errno
import itertools
import math
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatrain_cli.checkpoint.fsio import FileSystem

Tree = dict[str, bytes | None]
"""Bytes of each file below the root by its relative path; None for a folder."""

_EXHAUSTIVE = 600
_SAMPLES = 60


@dataclass(frozen=True)
class Op:
    """One entry of a log; `told` is what the program said at that moment."""

    kind: str
    path: str = ""
    target: str = ""
    offset: int = 0
    data: bytes = b""
    told: int = 0


class RecordingFileSystem(FileSystem):
    """The real file system; `log` has every operation that changes or syncs something."""

    def __init__(self, root: Path, *, renames_folders: bool = True) -> None:
        self.root = root
        self.renames_folders = renames_folders
        self.log: list[Op] = []
        self._paths: dict[int, str] = {}

    def _name(self, path: Path) -> str:
        name = path.relative_to(self.root).as_posix()
        return "" if name == "." else name

    def tell(self, kind: str, told: int) -> None:
        self.log.append(Op(kind, told=told))

    def make_folder(self, path: Path) -> None:
        super().make_folder(path)
        self.log.append(Op("make_folder", self._name(path)))

    def create(self, path: Path, direct: bool) -> int:
        fd = super().create(path, direct)
        self._paths[fd] = self._name(path)
        self.log.append(Op("create", self._name(path)))
        return fd

    def allocate(self, fd: int, num_bytes: int) -> None:
        super().allocate(fd, num_bytes)
        self.log.append(Op("truncate", self._paths[fd], offset=num_bytes))

    def write(self, fd: int, buffer: memoryview, offset: int) -> int:
        taken = super().write(fd, buffer, offset)
        data = bytes(buffer[:taken])
        self.log.append(Op("write", self._paths[fd], offset=offset, data=data))
        return taken

    def truncate(self, fd: int, num_bytes: int) -> None:
        super().truncate(fd, num_bytes)
        self.log.append(Op("truncate", self._paths[fd], offset=num_bytes))

    def sync(self, fd: int) -> None:
        super().sync(fd)
        self.log.append(Op("sync", self._paths[fd]))

    def sync_folder(self, path: Path) -> None:
        super().sync_folder(path)
        self.log.append(Op("sync_folder", self._name(path)))

    def rename_new(self, source: Path, target: Path) -> None:
        if not self.renames_folders:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        super().rename_new(source, target)
        self.log.append(Op("rename", self._name(source), self._name(target)))

    def rename_over(self, source: Path, target: Path) -> None:
        super().rename_over(source, target)
        self.log.append(Op("rename", self._name(source), self._name(target)))

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self.log.append(Op("remove", self._name(path)))

    def remove_folder(self, path: Path) -> None:
        super().remove_folder(path)
        self.log.append(Op("remove", self._name(path)))


@dataclass(eq=False)
class _File:
    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    dirty: bool = True

    def change(self, op: Op) -> None:
        if op.kind == "sync":
            self.synced, self.dirty = bytes(self.data), False
            return
        self.dirty = True
        end = op.offset + len(op.data)
        if op.kind == "truncate":
            del self.data[end:]
        self.data.extend(bytes(max(0, end - len(self.data))))
        self.data[op.offset : end] = op.data

    def remains(self) -> list[bytes]:
        """What a crash may leave of it."""
        data, half = bytes(self.data), len(self.data) // 2
        if not self.dirty:
            return [data]
        torn = (data[:half], data[:half].ljust(len(data), b"\0"), bytes(len(data)))
        return list(dict.fromkeys((self.synced, *torn, data)))


@dataclass(eq=False)
class _Folder:
    """`pending`: changes of names since the last sync, each seen whole or not at all."""

    entries: "dict[str, _File | _Folder]" = field(default_factory=dict)
    synced: "dict[str, _File | _Folder]" = field(default_factory=dict)
    pending: "list[dict[str, _File | _Folder | None]]" = field(default_factory=list)

    def change(self, names: "dict[str, _File | _Folder | None]") -> None:
        _apply(self.entries, names)
        self.pending.append(names)

    def sync(self) -> None:
        self.synced, self.pending = dict(self.entries), []

    def surviving(self, kept: Sequence[bool]) -> "dict[str, _File | _Folder]":
        """Its names after a crash that kept some of the pending changes."""
        entries = dict(self.synced)
        for names in itertools.compress(self.pending, kept):
            _apply(entries, names)
        return entries

    def below(self) -> "Iterator[_File | _Folder]":
        """All nodes that may be found below it, removed ones included."""
        pending = (node for names in self.pending for node in names.values() if node is not None)
        for node in {id(n): n for n in (*self.synced.values(), *pending)}.values():
            yield node
            if isinstance(node, _Folder):
                yield from node.below()


def _apply(
    entries: dict[str, _File | _Folder], names: Mapping[str, _File | _Folder | None]
) -> None:
    for name, node in names.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


class Disk:
    """The model: an empty, synced root, changed by a log's operations."""

    def __init__(self) -> None:
        self.root = _Folder()

    def apply(self, op: Op) -> None:
        parent, name = self._parent(op.path)
        node = parent.entries.get(name)
        match op.kind:
            case "make_folder":
                parent.change({name: _Folder()})
            case "create":
                parent.change({name: _File()})
            case "remove":
                parent.change({name: None})
            case "rename":
                other, new_name = self._parent(op.target)
                if other is parent:
                    parent.change({name: None, new_name: node})
                else:  # a change of two folders, of which each may be lost alone
                    parent.change({name: None})
                    other.change({new_name: node})
            case "sync_folder":
                folder = node if op.path else self.root
                assert isinstance(folder, _Folder)
                folder.sync()
            case "write" | "truncate" | "sync":
                assert isinstance(node, _File)
                node.change(op)
            case _:
                assert op.told, f"{op.kind} is no operation"

    def _parent(self, path: str) -> tuple[_Folder, str]:
        *folders, name = path.split("/")
        at = self.root
        for folder in folders:
            below = at.entries[folder]
            assert isinstance(below, _Folder)
            at = below
        return at, name

    def now(self) -> Tree:
        """What a reader sees without a crash."""
        return dict(_walk(self.root, lambda folder: folder.entries, lambda file: bytes(file.data)))

    def crashes(self, rng: random.Random) -> Iterator[Tree]:
        """What may be found after a crash at this moment: all of it, or corners and samples."""
        nodes = list({id(node): node for node in (self.root, *self.root.below())}.values())
        folders = [node for node in nodes if isinstance(node, _Folder) and node.pending]
        files = [node for node in nodes if isinstance(node, _File)]
        options: list[Sequence[bytes | bool]] = [
            *((False, True) for folder in folders for _ in folder.pending),
            *(file.remains() for file in files),
        ]
        for choice in _choices(options, rng):
            values = iter(choice)
            entries = {
                id(folder): folder.surviving([bool(next(values)) for _ in folder.pending])
                for folder in folders
            }
            data = {id(file): bytes(next(values)) for file in files}
            yield _crashed(self.root, entries, data)


def _crashed(
    root: _Folder,
    entries: Mapping[int, dict[str, _File | _Folder]],
    data: Mapping[int, bytes],
) -> Tree:
    return dict(
        _walk(
            root,
            lambda folder: entries.get(id(folder), folder.synced),
            lambda file: data[id(file)],
        )
    )


def _choices(
    options: Sequence[Sequence[bytes | bool]], rng: random.Random
) -> Iterator[Sequence[bytes | bool]]:
    if math.prod(map(len, options)) <= _EXHAUSTIVE:
        yield from itertools.product(*options)
        return
    for corner in (0, -1):  # all lost, all kept; then each alone the other way
        base = [option[corner] for option in options]
        yield base
        for index, option in enumerate(options):
            for value in option:
                yield [*base[:index], value, *base[index + 1 :]]
    for _ in range(_SAMPLES):
        yield [rng.choice(option) for option in options]


def _walk(
    folder: _Folder,
    entries: Callable[[_Folder], Mapping[str, _File | _Folder]],
    data: Callable[[_File], bytes],
    below: str = "",
) -> Iterator[tuple[str, bytes | None]]:
    for name, node in entries(folder).items():
        if isinstance(node, _Folder):
            yield below + name, None
            yield from _walk(node, entries, data, f"{below}{name}/")
        else:
            yield below + name, data(node)


def crash_states(log: Sequence[Op], seed: int = 0) -> Iterator[tuple[int, Tree]]:
    """Each tree that may be found after a crash, with how much of the log had happened."""
    disk, rng = Disk(), random.Random(seed)
    for done, op in enumerate((*log, None)):
        yield from ((done, tree) for tree in disk.crashes(rng))
        if op is not None:
            disk.apply(op)


def tree_at(root: Path) -> Tree:
    """The real tree below a folder."""
    return {
        path.relative_to(root).as_posix(): None if path.is_dir() else path.read_bytes()
        for path in root.rglob("*")
    }


def lay_out(root: Path, tree: Tree) -> None:
    """Make a tree real, below a new folder."""
    root.mkdir()
    for path, data in sorted(tree.items()):
        if data is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(data)
