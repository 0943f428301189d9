"""How much memory can be page-locked at once: tried, since limits that can be read do not say."""

from collections.abc import Callable
from dataclasses import dataclass

from megatrain_cli.errors import DeviceError, PlanError
from megatrain_cli.store.arena import Arena
from megatrain_cli.store.pagelock import lock_pages, unlock_pages
from megatrain_cli.units import GIB

# Of the RAM that may be taken: what a run locks (weights and gradients of 14 bytes a parameter) is
# less than a third of it, and the rest of the machine has to live meanwhile.
SHARE_OF_HOST = 0.5

# Locking takes 0.03 to 0.05 s/GB (one H200 machine, 2026-11-29), so a step ends soon.
_LARGEST_STEP = 8 * GIB


@dataclass(frozen=True)
class Lockable:
    """What worked: so many bytes at once, and whether the driver refused more."""

    num_bytes: int
    refused: bool


def find_lockable(
    lock: Callable[[int], bool],
    limit: int,
    first_step: int,
    may_go_on: Callable[[], bool] = lambda: True,
) -> Lockable:
    """Lock more and more, in steps that double until one is refused and are halved from then on.

    Args:
        lock: Locks so many more bytes; False if that was refused.
        limit: Bytes to stop at, or just below.
        first_step: The first step, and the grain of all.
        may_go_on: Asked before each step.
    """
    most = max(_LARGEST_STEP // first_step, 1)
    total, step, refused = 0, 1, False  # in first steps
    while total < limit // first_step and may_go_on():
        step = min(step, limit // first_step - total)
        if lock(step * first_step):
            total += step
            step = step if refused else min(2 * step, most)
            continue
        refused = True
        if step == 1:
            break
        step //= 2
    return Lockable(total * first_step, refused)


class Locker:
    """Locks fresh memory and holds it; unlocks all when its `with` is left.

    Args:
        lock: Page-locks `(address, num_bytes)`, raising DeviceError.
        unlock: Undoes that for an address.
    """

    def __init__(
        self,
        lock: Callable[[int, int], None] = lock_pages,
        unlock: Callable[[int], None] = unlock_pages,
    ) -> None:
        self._lock, self._unlock = lock, unlock
        self._held: list[tuple[int, Arena]] = []

    def lock(self, num_bytes: int) -> bool:
        """Lock so many more bytes; False if the driver or the system refused."""
        try:
            arena = Arena(num_bytes)
        except PlanError:
            return False
        memory = arena.take(num_bytes)
        # The driver would touch fresh pages on one core; torch has many.
        memory.fill_(1)
        try:
            self._lock(memory.data_ptr(), arena.num_bytes)
        except DeviceError:
            return False
        self._held.append((memory.data_ptr(), arena))
        return True

    def __enter__(self) -> "Locker":
        return self

    def __exit__(self, *_: object) -> None:
        while self._held:
            address, arena = self._held.pop()
            self._unlock(address)
            arena.close()
