"""A step's ops over time as text: one line a lane, so that waiting can be seen."""

from collections.abc import Sequence
from dataclasses import dataclass

_WIDTH = 96
_IDLE = "."


@dataclass(frozen=True)
class Bar:
    """An op at work.

    Attributes:
        lane: Where.
        kind: What it does; its line is drawn with the letter of `letters`.
        start: Seconds.
        end: Seconds, not before `start`.
        what: What it works on, such as `layer 3`.
    """

    lane: str
    kind: str
    start: float
    end: float
    what: str = ""


def draw_timeline(bars: Sequence[Bar], letters: dict[str, str], width: int = _WIDTH) -> str:
    """The bars, each column showing what took most of its time in a lane; dots are idle time.

    Args:
        bars: At least one that takes time.
        letters: One for each kind.
        width: Columns.
    """
    begin, end = min(bar.start for bar in bars), max(bar.end for bar in bars)
    column = (end - begin) / width
    lanes = list(dict.fromkeys(bar.lane for bar in bars))
    longest = max(map(len, lanes))
    lines = []
    for lane in lanes:
        row = _row([bar for bar in bars if bar.lane == lane], letters, begin, column, width)
        lines.append(f"{lane:<{longest}} |{row}|")
    scale = f"{'':<{longest}}  0 s{f'{end - begin:.3g} s':>{width - 3}}"
    shown = dict.fromkeys(bar.kind for bar in bars)
    legend = ", ".join(f"{letters[kind]} {kind}" for kind in shown)
    return "\n".join([*lines, scale, f"{legend}, {_IDLE} idle"])


def _row(
    bars: Sequence[Bar], letters: dict[str, str], begin: float, column: float, width: int
) -> str:
    shares: list[dict[str, float]] = [{} for _ in range(width)]
    for bar in bars:
        first = min(int((bar.start - begin) / column), width - 1)
        last = min(int((bar.end - begin) / column), width - 1)
        for place in range(first, last + 1):
            left = begin + place * column
            share = min(bar.end, left + column) - max(bar.start, left)
            shares[place][bar.kind] = shares[place].get(bar.kind, 0.0) + max(share, 0.0)
    row = ""
    for found in shares:
        busy = sum(found.values())
        # A column that idles for more than half of its time shows that.
        row += letters[max(found, key=found.__getitem__)] if 2 * busy >= column else _IDLE
    return row
