"""One host allocation of exact size that the store cuts its tiles from."""

import contextlib
import mmap

import torch

from megatrain_cli.errors import DeviceError, InternalError, PlanError
from megatrain_cli.plan.tiles import PAGE_BYTES
from megatrain_cli.store.pagelock import lock_pages, unlock_pages
from megatrain_cli.units import round_up, show_bytes


class Arena:
    """A private anonymous mapping; pages cost RAM from the first time they are touched.

    Private, because the kernel counts shared pages as shared memory, which containers limit apart
    and which nobody finds when they look for who took the RAM.

    The cuts keep the mapping alive: its memory returns to the system when `close` was called and
    the last view of it is gone. A view used after `close` is still valid memory.

    Raises:
        PlanError: The system has no such range to give.
    """

    def __init__(self, num_bytes: int) -> None:
        if num_bytes <= 0:
            raise InternalError(f"An arena of {num_bytes} bytes.")
        self.num_bytes = round_up(num_bytes, PAGE_BYTES)
        try:
            mapping = mmap.mmap(-1, self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, MemoryError, OverflowError) as error:
            raise PlanError(
                f"The system refused to map {show_bytes(self.num_bytes)} of host RAM ({error}). "
                "Use a machine with more, or a smaller model."
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # A kernel without huge pages refuses: slower to touch and to lock, nothing else.
            with contextlib.suppress(OSError):
                mapping.madvise(mmap.MADV_HUGEPAGE)
        # `frombuffer` keeps the mapping object alive, but does not stop `mapping.close()` from
        # unmapping under live views. So nobody ever calls that: dropping references is enough.
        self._memory: torch.Tensor | None = torch.frombuffer(mapping, dtype=torch.uint8)
        self._taken = 0
        self._locked: list[tuple[int, int]] = []

    @property
    def free_bytes(self) -> int:
        """Bytes not taken yet."""
        return self.num_bytes - self._taken

    @property
    def locked_bytes(self) -> int:
        """Bytes that are page-locked now."""
        return sum(num_bytes for _, num_bytes in self._locked)

    def take(self, num_bytes: int) -> torch.Tensor:
        """The next `num_bytes` as a `uint8` view, zeros, on a page of its own."""
        if self._memory is None:
            raise InternalError("The arena is closed.")
        if num_bytes > self.free_bytes:
            raise InternalError(
                f"The arena of {self.num_bytes} bytes has {self.free_bytes} left, "
                f"and {num_bytes} were asked for."
            )
        cut = self._memory[self._taken : self._taken + num_bytes]
        self._taken = min(self.num_bytes, round_up(self._taken + num_bytes, PAGE_BYTES))
        return cut

    def register(self, cut: torch.Tensor, what: str, otherwise: str) -> None:
        """Page-lock a contiguous view of the arena in place, all pages that it touches.

        Args:
            cut: Its contents stay.
            what: What it holds, for the message.
            otherwise: What a user can do instead of allowing more locked memory, for the message.

        Raises:
            DeviceError: The driver refused. Everything locked before is unlocked again: half a
                page-locked store would be neither fast nor small.
        """
        if self._memory is None:
            raise InternalError("The arena is closed.")
        base = self._memory.data_ptr()
        first = (cut.data_ptr() - base) // PAGE_BYTES * PAGE_BYTES
        end = round_up(cut.data_ptr() - base + cut.nbytes, PAGE_BYTES)
        # The driver would touch fresh pages on one core. An addition of 0 touches them on all of
        # torch's threads and leaves what is there.
        self._memory[first:end].view(torch.int64).add_(0)
        try:
            lock_pages(base + first, end - first)
        except DeviceError as error:
            before = self.locked_bytes
            self.unregister()
            raise DeviceError(
                f"{what}: {error} {show_bytes(before)} had been locked before and are free again. "
                f"Raise the limit on lockable memory (`ulimit -l`), or {otherwise}."
            ) from error
        self._locked.append((base + first, end - first))

    def unregister(self) -> None:
        """Unlock everything that `register` locked. No copy may be in flight."""
        while self._locked:
            address, _ = self._locked.pop()
            unlock_pages(address)

    def close(self) -> None:
        """Unlock everything and let go of the memory; calling it again does nothing."""
        self.unregister()
        self._memory = None
