"""Write one file of a checkpoint from pieces of memory, hashed on the way, without a second copy.

Tiles fill the host's RAM, so a save may not fill the page cache with another copy of them: bytes
go past it (`O_DIRECT`), straight from the tiles wherever they lie aligned. What does not, and
what the system refuses, goes through one small buffer a thread. Where `O_DIRECT` is refused
altogether, each chunk is written back and taken out of the page cache soon after.
"""

import errno
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import xxhash

from megatrain_cli.checkpoint.fsio import BLOCK, FileSystem
from megatrain_cli.units import MIB

Piece = memoryview | bytes
Mode = Literal["direct", "bounce", "buffered"]

_REFUSED = (errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP)


@dataclass(frozen=True)
class WrittenFile:
    """A file that is whole on the disk.

    Attributes:
        name: Relative to the checkpoint, as `training/optim-embed.safetensors`.
        xxh3_128: Of the whole file, 32 hexadecimal digits, as `xxh128sum` prints them.
    """

    name: str
    num_bytes: int
    xxh3_128: str


class FileWriter:
    """Writes files; any number of threads may do so at once.

    Attributes:
        mode: `direct`: past the page cache, from the pieces where they are aligned. `bounce`: past
            the page cache, but the system refuses the pieces' memory. `buffered`: through the page
            cache. Only ever falls, so it can be told once.
    """

    def __init__(
        self,
        fs: FileSystem,
        *,
        chunk_bytes: int = 16 * MIB,
        direct: Literal["auto", "off"] = "auto",
    ) -> None:
        """Memory taken is `chunk_bytes` a thread.

        Args:
            fs: Where to write.
            chunk_bytes: The most that is written at once; a multiple of `BLOCK`.
            direct: `auto` tries to pass the page cache by.
        """
        if chunk_bytes <= 0 or chunk_bytes % BLOCK:
            raise ValueError(f"chunk_bytes is {chunk_bytes}, no multiple of {BLOCK}")
        self._fs = fs
        self._chunk_bytes = chunk_bytes
        self._direct = direct == "auto"
        self._straight = True
        self._own = threading.local()

    @property
    def mode(self) -> Mode:
        """How files are written from now on."""
        if not self._direct:
            return "buffered"
        return "direct" if self._straight else "bounce"

    def write(
        self,
        path: Path,
        name: str,
        pieces: Sequence[Piece],
        progress: Callable[[int], None] | None = None,
    ) -> WrittenFile:
        """Write a new file, one piece after the other, and wait until it is on the disk.

        The folder's entry for it is not: `FileSystem.sync_folder` does that.

        Args:
            path: Must not exist.
            name: For the result.
            pieces: Contiguous bytes; must not change meanwhile. Pass neighbours in memory as one
                piece: each piece is looked at by itself.
            progress: Told the bytes written so far, after each chunk. What it raises ends the
                write.

        Raises:
            OSError: The disk refused; `filename` is set. The file is torn and must be removed,
                and its `sync` never tried again.
        """
        try:
            return self._write(path, name, pieces, progress)
        except OSError as error:
            if error.filename is None:
                error.filename = str(path)
            raise

    def _write(
        self,
        path: Path,
        name: str,
        pieces: Sequence[Piece],
        progress: Callable[[int], None] | None,
    ) -> WrittenFile:
        views = [view for piece in pieces if (view := memoryview(piece).cast("B"))]
        total = sum(view.nbytes for view in views)
        digest = xxhash.xxh3_128()
        file = self._open(path)
        try:
            if total:
                self._fs.allocate(file.fd, total)
            at = dropped = 0
            for chunk in self._chunks(views, file):
                digest.update(chunk.data)
                self._put(file, chunk, at)
                if not file.direct and dropped < at:
                    # What came before this chunk had the time of a copy to reach the disk.
                    self._fs.drop_cache(file.fd, dropped, at - dropped)
                    dropped = at
                at += chunk.data.nbytes
                if progress is not None:
                    progress(at)
            self._fs.truncate(file.fd, total)
            self._fs.sync(file.fd)
            if not file.direct and total:
                self._fs.drop_cache(file.fd, 0, total)
        except BaseException:
            with suppress(OSError):  # the first failure is the one to tell; the file is torn anyway
                self._fs.close(file.fd)
            raise
        self._fs.close(file.fd)
        return WrittenFile(name, total, digest.hexdigest())

    def _open(self, path: Path) -> "_OpenFile":
        if self._direct:
            try:
                return _OpenFile(self._fs.create(path, direct=True), direct=True)
            except OSError as error:
                if error.errno not in _REFUSED:
                    raise
                self._direct = False
                # Linux looks at the flag last: by then it has made the file.
                if self._fs.exists(path):
                    self._fs.unlink(path)
        return _OpenFile(self._fs.create(path, direct=False), direct=False)

    def _chunks(self, views: Sequence[memoryview], file: "_OpenFile") -> Iterator["_Chunk"]:
        """What to write, in order; while the file is direct, whole blocks except at its end.

        A chunk of copies is valid until the next is asked for.
        """
        bounce = self._bounce()
        filled = 0
        for segment, straight in self._segments(views, file):
            if straight:
                if filled:
                    yield _Chunk(bounce[:filled], straight=False)
                    filled = 0
                for start in range(0, segment.nbytes, self._chunk_bytes):
                    yield _Chunk(segment[start : start + self._chunk_bytes], straight=True)
                continue
            copied = 0
            while copied < segment.nbytes:
                size = min(segment.nbytes - copied, self._chunk_bytes - filled)
                bounce[filled : filled + size] = segment[copied : copied + size]
                copied += size
                filled += size
                if filled == self._chunk_bytes:
                    yield _Chunk(bounce, straight=False)
                    filled = 0
        if filled:
            yield _Chunk(bounce[:filled], straight=False)

    def _segments(
        self, views: Sequence[memoryview], file: "_OpenFile"
    ) -> Iterator[tuple[memoryview, bool]]:
        """Cut each view into what may be written from where it lies, and what must be copied."""
        at = 0
        for view in views:
            begin, end = 0, view.nbytes
            if not self._straight:
                end = 0
            elif file.direct:
                begin = -at % BLOCK  # up to the file's next block
                aligned = (_address(view) + begin) % BLOCK == 0
                end = begin + max(0, view.nbytes - begin) // BLOCK * BLOCK if aligned else begin
            if begin < end:
                yield view[:begin], False
                yield view[begin:end], True
                yield view[end:], False
            else:
                yield view, False
            at += view.nbytes

    def _put(self, file: "_OpenFile", chunk: "_Chunk", offset: int) -> None:
        """Write a whole chunk, in as many requests and by whichever way the system takes it."""
        data, straight = chunk
        if straight and not self._straight:
            data, straight = self._copied(data), False
        if file.direct and data.nbytes % BLOCK:
            # The end of the file, in the bounce buffer: a whole block is written and what is too
            # much is cut off afterwards.
            data = self._bounce()[: data.nbytes + -data.nbytes % BLOCK]
        done = 0
        while done < data.nbytes:
            try:
                taken = self._fs.write(file.fd, data[done:], offset + done)
            except InterruptedError:
                continue
            except OSError as error:
                if error.errno not in _REFUSED:
                    raise
                if straight:
                    self._straight = False
                    data, straight = self._copied(data), False
                elif file.direct:
                    self._leave_direct(file)
                else:
                    raise
                continue
            if file.direct and taken < data.nbytes - done:
                taken -= taken % BLOCK  # the next request must begin at a block
                if not taken:
                    self._leave_direct(file)
            elif not taken:
                raise OSError(errno.EIO, "the disk takes no more bytes and gives no reason")
            done += taken

    def _leave_direct(self, file: "_OpenFile") -> None:
        self._fs.leave_direct(file.fd)
        self._direct = file.direct = False

    def _copied(self, data: memoryview) -> memoryview:
        bounce = self._bounce()[: data.nbytes]
        bounce[:] = data
        return bounce

    def _bounce(self) -> memoryview:
        """This thread's buffer of one chunk, in huge pages: small ones take longer to write."""
        found: memoryview | None = getattr(self._own, "bounce", None)
        if found is None:
            pages = mmap.mmap(-1, self._chunk_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with suppress(OSError):  # a kernel without them: slower, nothing else
                    pages.madvise(mmap.MADV_HUGEPAGE)
            found = self._own.bounce = memoryview(pages)
        return found


class _Chunk(NamedTuple):
    """Bytes to write, and whether they lie where they were given (else in the bounce buffer)."""

    data: memoryview
    straight: bool


@dataclass
class _OpenFile:
    fd: int
    direct: bool


def _address(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data
