"""Read one part of a shard straight into its tile, in chunks, hashed in the order of the file."""

import ctypes
import errno
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import xxhash

from megatrain_cli.checkpoint.folder import ADVICE, OpenCheckpoint
from megatrain_cli.checkpoint.fsio import BLOCK, FileSystem
from megatrain_cli.checkpoint.headers import Header
from megatrain_cli.checkpoint.manifest import Part
from megatrain_cli.checkpoint.parts import TilePart
from megatrain_cli.checkpoint.verify import check_header, wrong_hash
from megatrain_cli.errors import CorruptError

# What the system answers where it cannot read past the page cache.
_REFUSED = (errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP)


@dataclass(frozen=True, eq=False)
class Chunk:
    """Part of a file, and the memory it belongs in."""

    offset: int
    buffer: memoryview
    direct: bool


class PartReader:
    """One part on its way into its tile. Its chunks may be read by any threads, in any order.

    Args:
        checkpoint: Has it open.
        part: What the manifest says of it.
        target: Where its payload belongs, tensor by tensor as in the manifest.
        fs: What it is read with.
        chunk_bytes: The most that is read at once; a multiple of `BLOCK`.
        direct: Read past the page cache where file and memory are aligned.
    """

    def __init__(
        self,
        checkpoint: OpenCheckpoint,
        part: Part,
        target: TilePart,
        fs: FileSystem,
        *,
        chunk_bytes: int,
        direct: bool,
    ) -> None:
        self.what = f"{checkpoint.folder / part.file}"
        self._part, self._fs = part, fs
        self._fd = checkpoint.fd(part.file)
        self._direct_fd = checkpoint.fd(part.file, direct=True) if direct else self._fd
        self._head = bytearray(part.data_start)
        self._header: Header | None = None
        direct = direct and self._direct_fd != self._fd
        chunks = [Chunk(0, memoryview(self._head), False)]
        offset = part.data_start
        for piece in target.pieces:
            chunks += _cut(piece, offset, chunk_bytes, direct)
            offset += piece.nbytes
        self.chunks: tuple[Chunk, ...] = tuple(chunks)
        self._read = [False] * len(chunks)
        self._digest = xxhash.xxh3_128()
        self._num_hashed = 0
        self._hashing = False
        self._lock = threading.Lock()  # guards `_read`, `_num_hashed` and `_hashing`

    def read(self, number: int) -> int:
        """Fill a chunk's memory; each once.

        Returns:
            Bytes that were read.

        Raises:
            CorruptError: The disk does not return it.
        """
        chunk = self.chunks[number]
        done, direct = 0, chunk.direct
        while done < chunk.buffer.nbytes:
            at = chunk.offset + done
            try:
                got = self._fs.read(
                    self._direct_fd if direct else self._fd, chunk.buffer[done:], at
                )
            except OSError as error:
                if direct and error.errno in _REFUSED:
                    direct = False
                    continue
                raise CorruptError(
                    f"{self.what}: cannot be read at byte {at}: {error.strerror or error}. {ADVICE}"
                ) from error
            if not got:
                raise CorruptError(
                    f"{self.what}: truncated while it was read: it ends at byte {at} of "
                    f"{self._part.bytes}. {ADVICE}"
                )
            done += got
            direct = direct and not done % BLOCK  # a short read leaves the rest unaligned
        if not direct:
            self._fs.drop_cache(self._fd, chunk.offset, done)
        return done

    def hash_read(self, number: int) -> tuple[int, bool]:
        """Hash a chunk that was read, and those behind it that wait for it.

        Returns:
            How many chunks this call has hashed: none if another thread does it, or if it is not
            their turn; and whether that was the end: the part is in the tile, and right.

        Raises:
            CorruptError: The header or the whole file is not what was saved.
        """
        with self._lock:
            self._read[number] = True
            if self._hashing:
                return 0, False
            self._hashing = True
        hashed, ended = 0, False
        while (chunk := self._next_to_hash()) is not None:
            if self._header is None:
                self._header = check_header(self._part, bytes(self._head), self.what)
            self._digest.update(chunk.buffer)
            hashed += 1
            with self._lock:
                self._num_hashed += 1
                ended = self._num_hashed == len(self.chunks)
        if ended:
            found = self._digest.hexdigest()
            if found != self._part.xxh3_128:
                assert self._header is not None
                raise wrong_hash(self._part, found, self._header, self.what)
        return hashed, ended

    def _next_to_hash(self) -> Chunk | None:
        """The first chunk that is not hashed, if it was read; else nobody is hashing any more."""
        with self._lock:
            if self._num_hashed < len(self.chunks) and self._read[self._num_hashed]:
                return self.chunks[self._num_hashed]
            self._hashing = False
            return None


def _cut(piece: memoryview, offset: int, chunk_bytes: int, direct: bool) -> Iterator[Chunk]:
    """Chunks of a piece of memory that belongs at `offset` of the file, cut at its blocks."""
    start = 0
    aligned = direct and (_address(piece) - offset) % BLOCK == 0
    while start < piece.nbytes:
        at = offset + start
        size = min(piece.nbytes - start, chunk_bytes - at % chunk_bytes)
        whole = size // BLOCK * BLOCK
        straight = aligned and at % BLOCK == 0 and whole > 0
        if straight:
            size = whole  # the rest, less than a block, is a chunk of its own
        yield Chunk(at, piece[start : start + size], straight)
        start += size


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
