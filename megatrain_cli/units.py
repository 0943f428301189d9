"""Bytes and counts as text. Numbers stay `int` and `float` everywhere else."""

import math
import re
from collections.abc import Callable

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_UNITS = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": 1 << 40,
}  # fmt: skip


def read_bytes(text: str) -> int | None:
    """`5GB` -> 5,000,000,000; `512 MiB`; a bare number is bytes. None for what is no size."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", text.strip())
    unit = _UNITS.get(found[2].upper()) if found else None
    size = float(found[1]) * unit if found and unit else math.inf
    return int(size) if size < math.inf else None


def show_bytes(num_bytes: int) -> str:
    """`1536` -> `1.5 KiB`; the unit is the largest that keeps the number at least 1."""
    for size, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(num_bytes) >= size:
            value = num_bytes / size
            return f"{value:.2f} {name}" if abs(value) < 10 else f"{value:.1f} {name}"
    return f"{num_bytes} B"


def show_count(count: int) -> str:
    """`134515008` -> `134.5M`."""
    for size, name in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if abs(count) >= size:
            return f"{count / size:.4g}{name}"
    return str(count)


def show_number(count: int, noun: str, show: Callable[[int], str] = str) -> str:
    """`1 layer`, `2 layers`; `show` writes the number, as `show_count` does."""
    return f"{show(count)} {noun}{'s' * (count != 1)}"


def show_rate(per_second: float) -> str:
    """A number a second in plain digits, three of them where there are fewer: `11106`, `0.0878`."""
    return f"{per_second:.0f}" if per_second >= 100 else f"{per_second:.3g}"


def show_seconds(seconds: float) -> str:
    """Seconds to three digits, `0.0308 s`; from a thousand on as `show_duration` has them."""
    return f"{seconds:.3g} s" if seconds < 999.5 else show_duration(seconds)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def show_duration(seconds: float) -> str:
    """Seconds as `42 s`, `12 min`, `3 h 05 min` or `2 d 4 h`."""
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if seconds < 100:
        return f"{seconds:.0f} s"
    if minutes < 100:
        return f"{minutes} min"
    if hours < 48:
        return f"{minutes // 60} h {minutes % 60:02} min"
    return f"{hours // 24} d {hours % 24} h"
