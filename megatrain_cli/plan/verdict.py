"""Whether a run fits, and with how much room to spare."""

from collections.abc import Mapping

from megatrain_cli.units import GIB, show_bytes

FITS, TIGHT, DOES_NOT_FIT = "FITS", "TIGHT", "DOES NOT FIT"

# A plan may be a little under what a run takes, and other programs may take more than now.
_SPARE_SHARE, _SPARE_BYTES = 0.05, 2 * GIB


def short_of_room(needed: int, limit: int) -> int:
    """Bytes that a place lacks for enough to stay free: 5 % of it, or 2 GiB where that is less."""
    return max(0, needed + min(int(_SPARE_SHARE * limit), _SPARE_BYTES) - limit)


def show_places(num_bytes: Mapping[str, int]) -> str:
    """`1.00 GiB of host RAM and 512.0 MiB of GPU memory`."""
    return " and ".join(f"{show_bytes(n)} of {name}" for name, n in num_bytes.items())


def verdict_line(
    verdict: str, places: Mapping[str, tuple[int, int]], wanting: Mapping[str, int]
) -> str:
    """The verdict with what is missing, or with what stays free.

    Args:
        verdict: One of the three.
        places: Bytes that are needed and bytes that there are, by name.
        wanting: Bytes that a tight run is short of enough room.
    """
    if verdict == DOES_NOT_FIT:
        parts = [
            f"{show_bytes(needed - limit)} of {name} are missing"
            for name, (needed, limit) in places.items()
            if needed > limit
        ]
    else:
        parts = [
            f"{show_bytes(limit - needed)} of {show_bytes(limit)} of {name} stay free"
            for name, (needed, limit) in places.items()
        ]
    line = f"{verdict}: {', '.join(parts)}"
    return f"{line}; short of comfort by {show_places(wanting)}" if verdict == TIGHT else line
