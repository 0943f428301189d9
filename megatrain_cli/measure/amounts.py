"""How much each measurement moves or computes: enough to be right, little enough to be quick."""

from dataclasses import dataclass, replace

from megatrain_cli.plan.rates import LAYER_WIDTH
from megatrain_cli.units import GIB, KIB, MIB

# All in all; a probe is promised to take less than a minute, imports and the end of a compile that
# was begun in time included. 45 took 65 s on a host whose RAM was half as fast as that of others of
# its kind (H200, 16 cores, 2026-11-30).
TOTAL_SECONDS = 42.0

# No array is larger than this share of the host RAM that is free; no part holds more than four.
_SHARE_OF_HOST = 16


@dataclass(frozen=True)
class Amounts:
    """Sizes of the work.

    Attributes:
        link_bytes: Sizes of a copy over the link, growing.
        copy_bytes: Of an array that is copied or read: beyond the largest last-level caches.
        adam_numel: Parameters of an update, and of what is saved; 14 bytes each: many times the
            largest last-level cache, so that what it may keep counts for little.
        lock_step_bytes: First step of page-locking.
        disk_bytes: Of all files; beyond what a disk may take faster at first.
        matmul_size: Rows and columns of the square product.
        layer_width: Hidden size of the decoder layer; its MLP is four times as wide.
        layer_tokens: Rows and tokens a row.
    """

    link_bytes: tuple[int, ...]
    copy_bytes: int
    adam_numel: int
    lock_step_bytes: int
    disk_bytes: int
    matmul_size: int
    layer_width: int
    layer_tokens: tuple[int, int]

    def within(self, host_bytes: int) -> "Amounts":
        """The same, with what lies in host RAM no larger than it allows."""
        most = max(host_bytes // _SHARE_OF_HOST, MIB)
        return replace(
            self,
            link_bytes=tuple(n for n in self.link_bytes if n <= most) or self.link_bytes[:1],
            copy_bytes=min(self.copy_bytes, most),
            adam_numel=min(self.adam_numel, most // 14),
        )


FULL = Amounts(
    link_bytes=tuple(256 * KIB << i for i in range(11)),
    copy_bytes=512 * MIB,
    adam_numel=1 << 28,
    lock_step_bytes=64 * MIB,
    disk_bytes=8 * GIB,
    matmul_size=8192,
    layer_width=LAYER_WIDTH,
    layer_tokens=(8, 1024),
)


def thread_counts(num_cores: int) -> tuple[int, ...]:
    """1, 2, 4, ... and all cores."""
    powers = [1 << i for i in range(num_cores.bit_length())]
    return tuple(sorted({*powers, num_cores}))
