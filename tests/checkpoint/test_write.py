"""A file holds its pieces one after the other, and its hash is theirs, whatever the disk does."""

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.checkpoint.fsio import BLOCK, FileSystem
from megatrain_cli.checkpoint.write import FileWriter, WrittenFile
from tests.checkpoint.disks import ReluctantFileSystem, address, is_direct

MANY = 3 * BLOCK
REFUSALS = (errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP)


def place(size: int, shift: int, seed: int = 0) -> memoryview:
    """Arbitrary bytes in memory that begins `shift` bytes after a page does."""
    pages = memoryview(mmap.mmap(-1, shift + size + 1))
    piece = pages[shift : shift + size]
    piece[:] = np.random.default_rng((seed, size, shift)).bytes(size)
    return piece


def check(
    folder: Path, fs: FileSystem, pieces: Sequence[memoryview | bytes], chunk_bytes: int = MANY
) -> FileWriter:
    """Write the pieces by a new writer, which is returned; as `check_with`."""
    writer = FileWriter(fs, chunk_bytes=chunk_bytes)
    check_with(writer, folder, pieces, chunk_bytes)
    return writer


def check_with(
    writer: FileWriter, folder: Path, pieces: Sequence[memoryview | bytes], chunk_bytes: int
) -> None:
    """Write the pieces and compare file, size and hash with their concatenation."""
    path = folder / "file"
    seen: list[int] = []
    try:
        written = writer.write(path, "training/file", pieces, seen.append)
        whole = b"".join(pieces)
        assert path.read_bytes() == whole
    finally:
        path.unlink(missing_ok=True)
    assert written == WrittenFile("training/file", len(whole), xxhash.xxh3_128_hexdigest(whole))
    assert seen == sorted(seen)
    assert seen[-1:] == ([len(whole)] if whole else [])
    assert all(after - before <= chunk_bytes for before, after in pairwise([0, *seen]))


sizes = st.one_of(
    st.integers(0, 40),
    st.integers(0, 5 * BLOCK),
    st.integers(0, 5).map(lambda blocks: blocks * BLOCK),
)
shifts = st.one_of(st.just(0), st.integers(0, BLOCK - 1))
pieces_lists = st.lists(st.tuples(sizes, shifts), max_size=7).map(
    lambda spots: [place(size, shift, seed) for seed, (size, shift) in enumerate(spots)]
)
disks = st.builds(
    ReluctantFileSystem,
    troubles=st.dictionaries(
        st.integers(0, 12), st.sampled_from((*REFUSALS[:1], *REFUSALS, errno.EINTR)), max_size=3
    ),
    sizes=st.one_of(
        st.just([]),
        st.lists(st.one_of(st.integers(1, 9000), st.just(BLOCK)), min_size=1, max_size=4),
    ),
    open_error=st.sampled_from([0, 0, errno.EINVAL, errno.EOPNOTSUPP]),
    made_first=st.booleans(),
)


@given(pieces=pieces_lists, chunk_blocks=st.integers(1, 4))
def test_the_file_is_its_pieces_and_its_hash_is_theirs(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[memoryview], chunk_blocks: int
) -> None:
    folder = tmp_path_factory.getbasetemp()
    assert check(folder, FileSystem(), pieces, chunk_blocks * BLOCK).mode == "direct"


@given(pieces=pieces_lists, chunk_blocks=st.integers(1, 4), fs=disks)
def test_no_short_write_interruption_or_refusal_of_memory_changes_a_byte(
    tmp_path_factory: pytest.TempPathFactory,
    pieces: list[memoryview],
    chunk_blocks: int,
    fs: ReluctantFileSystem,
) -> None:
    writer = FileWriter(fs, chunk_bytes=chunk_blocks * BLOCK)
    try:
        check_with(writer, tmp_path_factory.getbasetemp(), pieces, chunk_blocks * BLOCK)
    except OSError as error:
        # What is refused again after all else was given up is an error.
        if error.errno not in fs.troubles.values() or writer.mode != "buffered":
            raise


@pytest.mark.parametrize("code", REFUSALS)
@pytest.mark.parametrize("index", range(5))
def test_a_refusal_at_any_write_is_survived_and_remembered(
    tmp_path: Path, code: int, index: int
) -> None:
    pieces: list[memoryview | bytes] = [
        place(BLOCK, 1),
        place(9 * BLOCK, 0),
        place(5, 0),
        place(2 * BLOCK, 1),
    ]
    fs = ReluctantFileSystem(troubles={index: code})
    writer = check(tmp_path, fs, pieces)
    assert fs.calls > index, "the refusal was met"
    straight = 1 <= index <= 3  # the first write is the copied header, the last one is copied too
    assert writer.mode == ("bounce" if straight else "buffered")
    fs.troubles.clear()
    before = len(fs.writes)
    bounces = {address(writer._bounce()[:1])}
    writer.write(tmp_path / "next", "next", [place(MANY, 0)])
    straight_now = {at for at, _, _ in fs.writes[before:]} - bounces
    assert not straight_now if straight else straight_now


def test_memory_that_the_disk_refuses_is_tried_once_and_then_copied(tmp_path: Path) -> None:
    tile = place(20 * BLOCK, 0)
    inside = range(address(tile[:1]), address(tile[:1]) + tile.nbytes)
    refused: list[int] = []

    class Pinned(ReluctantFileSystem):
        """As some pinned memory: the kernel cannot read it for a direct write."""

        def write(self, fd: int, buffer: memoryview, offset: int) -> int:
            if address(buffer) in inside:
                refused.append(offset)
                raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
            return super().write(fd, buffer, offset)

    writer = FileWriter(Pinned(), chunk_bytes=MANY)
    for _ in range(2):
        check_with(writer, tmp_path, [bytes(BLOCK), tile], MANY)
    assert refused == [BLOCK]
    assert writer.mode == "bounce"


def test_bytes_go_straight_from_the_pieces_where_these_are_aligned(tmp_path: Path) -> None:
    fs = ReluctantFileSystem()
    header, tile = place(BLOCK, 64), place(8 * BLOCK + 100, 0)
    writer = check(tmp_path, fs, [header, tile])
    bounce, start = address(writer._bounce()[:1]), address(tile[:1])
    assert fs.writes == [
        (bounce, BLOCK, 0),
        (start, MANY, BLOCK),
        (start + MANY, MANY, BLOCK + MANY),
        (start + 2 * MANY, 2 * BLOCK, BLOCK + 2 * MANY),
        (bounce, BLOCK, 9 * BLOCK),  # the last 100 bytes, and more that is cut off again
    ]


def test_a_piece_that_becomes_aligned_inside_is_copied_only_up_to_there(tmp_path: Path) -> None:
    fs = ReluctantFileSystem()
    tile = place(3 * BLOCK, 96)
    writer = check(tmp_path, fs, [bytes(96), tile])
    bounce = address(writer._bounce()[:1])
    assert fs.writes == [
        (bounce, BLOCK, 0),
        (address(tile[:1]) + BLOCK - 96, 2 * BLOCK, BLOCK),
        (bounce, BLOCK, 3 * BLOCK),
    ]


@pytest.mark.parametrize("shift", [0, 1, 512])
def test_requests_past_the_page_cache_have_whole_aligned_blocks(tmp_path: Path, shift: int) -> None:
    fs = ReluctantFileSystem()
    check(tmp_path, fs, [place(777, shift), place(2 * MANY + 5, shift), place(MANY, 0)])
    assert all(number % BLOCK == 0 for write in fs.writes for number in write)


def test_without_direct_writes_nothing_is_copied_either(tmp_path: Path) -> None:
    fs = ReluctantFileSystem(open_error=errno.EINVAL, made_first=True)
    tile = place(MANY + 10, 7)
    assert check(tmp_path, fs, [tile]).mode == "buffered"
    start = address(tile[:1])
    assert fs.writes == [(start, MANY, 0), (start + MANY, 10, MANY)]


def test_direct_writes_can_be_left_off(tmp_path: Path) -> None:
    opened: list[bool] = []

    class Recording(FileSystem):
        def create(self, path: Path, direct: bool) -> int:
            fd = super().create(path, direct)
            opened.append(is_direct(fd))
            return fd

    for direct in ("auto", "off"):
        FileWriter(Recording(), direct=direct).write(tmp_path / direct, direct, [b"x"])
    assert opened == [True, False]


@pytest.mark.parametrize("direct", ["auto", "off"])
def test_a_written_file_leaves_nothing_in_the_page_cache(tmp_path: Path, direct: str) -> None:
    path = tmp_path / "file"
    tile = place(64 * BLOCK, 0)
    writer = FileWriter(FileSystem(), chunk_bytes=4 * BLOCK, direct=direct)  # type: ignore[arg-type]
    writer.write(path, "file", [tile])
    assert cached_blocks(path) == 0
    path.read_bytes()
    assert cached_blocks(path) > 0, "the measure sees what is cached"


def cached_blocks(path: Path) -> int:
    """Blocks of a file that are in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as pages:
        found = (ctypes.c_ubyte * -(-len(pages) // mmap.PAGESIZE))()
        start = ctypes.c_char.from_buffer(pages)
        try:
            address = ctypes.c_void_p(ctypes.addressof(start))
            assert libc.mincore(address, ctypes.c_size_t(len(pages)), found) == 0
        finally:
            del start  # else the mapping stays in use
    return sum(page & 1 for page in found)


def test_while_writing_through_the_page_cache_at_most_two_chunks_are_in_it(tmp_path: Path) -> None:
    chunk = 4 * BLOCK
    path = tmp_path / "file"
    cached: list[int] = []
    FileWriter(FileSystem(), chunk_bytes=chunk, direct="off").write(
        path, "file", [place(16 * chunk, 0)], lambda _: cached.append(cached_blocks(path))
    )
    assert 0 < max(cached) <= 2 * chunk // BLOCK


def test_room_is_reserved_before_the_first_byte(tmp_path: Path) -> None:
    calls: list[tuple[str, int]] = []

    class Recording(FileSystem):
        def allocate(self, fd: int, num_bytes: int) -> None:
            calls.append(("allocate", num_bytes))

        def write(self, fd: int, buffer: memoryview, offset: int) -> int:
            calls.append(("write", offset))
            return super().write(fd, buffer, offset)

    FileWriter(Recording()).write(tmp_path / "file", "file", [bytes(10), bytes(20)])
    assert calls == [("allocate", 30), ("write", 0)]


def test_each_thread_has_one_buffer_and_no_more(tmp_path: Path) -> None:
    writer = FileWriter(FileSystem(), chunk_bytes=BLOCK)
    buffers: dict[str, set[int]] = {}
    both = threading.Barrier(2, timeout=60)

    def write(name: str) -> None:
        both.wait()
        for index in range(2):
            data = name.encode() * 3000
            written = writer.write(tmp_path / f"{name}{index}", name, [data])
            assert written.xxh3_128 == xxhash.xxh3_128_hexdigest(data)
            buffers.setdefault(name, set()).add(address(writer._bounce()[:1]))
        both.wait()  # a buffer of a finished thread may be given to the next

    threads = [threading.Thread(target=write, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(own) for own in buffers.values()] == [1, 1]
    assert len(set.union(*buffers.values())) == 2


def test_a_disk_that_takes_nothing_and_says_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="takes no more bytes") as caught:
        FileWriter(ReluctantFileSystem(sizes=[0])).write(tmp_path / "file", "file", [b"abc"])
    assert caught.value.filename == str(tmp_path / "file")


def test_what_progress_raises_ends_the_write(tmp_path: Path) -> None:
    fds = set(Path("/proc/self/fd").iterdir())

    def stop(num_bytes: int) -> None:
        raise KeyError(num_bytes)

    with pytest.raises(KeyError, match=str(BLOCK)):
        FileWriter(FileSystem(), chunk_bytes=BLOCK).write(
            tmp_path / "file", "file", [place(MANY, 0)], stop
        )
    assert set(Path("/proc/self/fd").iterdir()) == fds


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"before")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("file", "link"):
        with pytest.raises(FileExistsError):
            FileWriter(FileSystem()).write(tmp_path / name, name, [b"after"])
    assert (tmp_path / "file").read_bytes() == b"before"
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("chunk_bytes", [0, -BLOCK, BLOCK + 1])
def test_a_chunk_is_whole_blocks(chunk_bytes: int) -> None:
    with pytest.raises(ValueError, match="no multiple of 4096"):
        FileWriter(FileSystem(), chunk_bytes=chunk_bytes)
