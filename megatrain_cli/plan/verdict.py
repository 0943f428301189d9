"""Whether a run fits, and with how much room to spare."""

from megatrain_cli.units import GIB, show_bytes

FITS, TIGHT, DOES_NOT_FIT = "FITS", "TIGHT", "DOES NOT FIT"

# A plan may be a little under what a run takes, and other programs may take more than now.
_SPARE_SHARE, _SPARE_BYTES = 0.05, 2 * GIB


def has_room(needed: int, limit: int) -> bool:
    """Whether enough stays free: 5 % of a place, or 2 GiB where that is less."""
    return needed + min(int(_SPARE_SHARE * limit), _SPARE_BYTES) <= limit


def verdict_line(verdict: str, places: dict[str, tuple[int, int]]) -> str:
    """The verdict with what is missing, or with what stays free.

    Args:
        verdict: One of the three.
        places: Bytes that are needed and bytes that there are, by name.
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
    return f"{verdict}: {', '.join(parts)}"
