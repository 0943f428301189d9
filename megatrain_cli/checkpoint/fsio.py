"""Every file operation a checkpoint needs, behind one seam that tests can record and make fail.

No other module of the package touches a checkpoint's files by `os` or `pathlib`. So a test that
wraps these methods sees, orders and breaks all that a save does to a disk.
"""

import ctypes
import errno
import fcntl
import os
import stat
from pathlib import Path

BLOCK = 4096
"""Bytes. Addresses, offsets and lengths of `O_DIRECT` requests are multiples of it."""

NO_RENAME = (errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM, errno.EXDEV)
"""Answers of a file system that cannot rename folders."""

_DIRECT = getattr(os, "O_DIRECT", 0)
_NOT_SUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)

# linux/fcntl.h and linux/fs.h: the values of the kernel's interface, the same on every machine.
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_WRITE_AND_WAIT = 1 | 2 | 4

_libc = ctypes.CDLL(None, use_errno=True)
# Offsets are 64 bits wide; without this ctypes would pass 32.
if hasattr(_libc, "sync_file_range"):
    _libc.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
if hasattr(_libc, "fallocate"):
    _libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class FileSystem:
    """The real file system. Every method may raise OSError."""

    def make_folder(self, path: Path) -> None:
        """Make one folder; its parent must exist and it must not."""
        path.mkdir()

    def create(self, path: Path, direct: bool) -> int:
        """Open a new file for writing.

        Args:
            path: Must not exist, not even as a link.
            direct: Past the page cache; some file systems refuse that with EINVAL.

        Returns:
            A file descriptor that the caller closes.
        """
        if direct and not _DIRECT:
            raise OSError(errno.EINVAL, "this system has no O_DIRECT", str(path))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(path, flags | (_DIRECT if direct else 0), 0o666)

    def leave_direct(self, fd: int) -> None:
        """Let later writes to an open file go through the page cache."""
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~_DIRECT)

    def allocate(self, fd: int, num_bytes: int) -> None:
        """Reserve a file's room, so that a full disk is met here; nothing where unsupported.

        Not by `posix_fallocate`: where the file system cannot, that writes a byte into each block,
        and so fills the page cache with the whole file.
        """
        if hasattr(_libc, "fallocate"):
            _raise_unless_unsupported(_libc.fallocate(fd, 0, 0, num_bytes))

    def write(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Write at `offset`; returns how many bytes were taken, maybe fewer than given."""
        return os.pwrite(fd, buffer, offset)

    def truncate(self, fd: int, num_bytes: int) -> None:
        """Set a file's length."""
        os.ftruncate(fd, num_bytes)

    def sync(self, fd: int) -> None:
        """Wait until a file's bytes and length are on the disk.

        Never call it again on a file for which it failed: the kernel may have dropped the bytes
        and would say that all is well.
        """
        os.fsync(fd)

    def close(self, fd: int) -> None:
        """Give a descriptor back; it is gone even if this raises."""
        os.close(fd)

    def drop_cache(self, fd: int, offset: int, num_bytes: int) -> None:
        """Write a range back and take it out of the page cache.

        An error of the write-back is raised: the kernel reports it once, so that a later `sync`
        would not.
        """
        if hasattr(_libc, "sync_file_range"):
            _raise_unless_unsupported(_libc.sync_file_range(fd, offset, num_bytes, _WRITE_AND_WAIT))
        os.posix_fadvise(fd, offset, num_bytes, os.POSIX_FADV_DONTNEED)

    def sync_folder(self, path: Path) -> None:
        """Wait until the names in a folder are on the disk."""
        fd = self.open_folder(path)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename_new(self, source: Path, target: Path) -> None:
        """Rename; FileExistsError if the target exists.

        A plain rename of a folder silently replaces an empty folder. Where the kernel or the file
        system cannot refuse by itself, the target is looked for first: whoever renames holds the
        run's lock, so that no other process makes the name in between.
        """
        code = _rename_noreplace(source, target)
        if code in _NOT_SUPPORTED:
            if os.path.lexists(target):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
            source.rename(target)
        elif code:
            raise OSError(code, os.strerror(code), str(source), None, str(target))

    def rename_over(self, source: Path, target: Path) -> None:
        """Rename; the target is replaced in one step."""
        source.replace(target)

    def unlink(self, path: Path) -> None:
        """Remove a file, or a link and not what it points to."""
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        path.rmdir()

    def list_folder(self, path: Path) -> list[str]:
        """Names in a folder, sorted."""
        return sorted(os.listdir(path))  # noqa: PTH208  names, not paths

    def exists(self, path: Path) -> bool:
        """Whether there is anything of that name, a dangling link included."""
        return os.path.lexists(path)

    def is_folder(self, path: Path) -> bool:
        """Whether it is a folder itself, and not a link to one."""
        return stat.S_ISDIR(path.lstat().st_mode)

    def free_bytes(self, path: Path) -> int:
        """Bytes that this user may still write to the file system that holds `path`."""
        facts = os.statvfs(path)
        return facts.f_bavail * facts.f_frsize

    def open_folder(self, path: Path) -> int:
        """Open a folder for `open_file`; it may be a link to one."""
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def open_file(self, folder_fd: int, name: str, direct: bool) -> int:
        """Open a file below an open folder for reading, following no link on the way.

        A fifo or device is opened without waiting for its other end; look at `status` before
        reading.

        Args:
            folder_fd: From `open_folder`; stays open.
            name: Relative, as `training/optim-embed.safetensors`.
            direct: Past the page cache.
        """
        *folders, last = parts = name.split("/")
        if {"", ".", ".."} & set(parts):
            raise OSError(errno.EINVAL, "not the name of a file below the folder", name)
        inside = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        at = os.dup(folder_fd)
        try:
            for folder in folders:
                below = os.open(folder, inside | os.O_DIRECTORY, dir_fd=at)
                os.close(at)
                at = below
            flags = inside | os.O_NONBLOCK | (_DIRECT if direct else 0)
            return os.open(last, flags, dir_fd=at)
        finally:
            os.close(at)

    def status(self, fd: int) -> os.stat_result:
        """Kind, size and owner of an open file."""
        return os.fstat(fd)

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Fill a writable buffer from `offset`; returns how many bytes came, 0 at the end."""
        return os.preadv(fd, [buffer], offset)


def _raise_unless_unsupported(failed: int) -> None:
    code = ctypes.get_errno()
    if failed and code not in _NOT_SUPPORTED:
        raise OSError(code, os.strerror(code))


def _rename_noreplace(source: Path, target: Path) -> int:
    """Try `renameat2`; returns 0 or the error's number."""
    if not hasattr(_libc, "renameat2"):
        return errno.ENOSYS
    names = os.fsencode(source), os.fsencode(target)
    failed = _libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_NOREPLACE)
    return ctypes.get_errno() if failed else 0
