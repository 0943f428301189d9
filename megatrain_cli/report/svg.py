"""Pieces of an SVG picture: text that keeps within a width, numbers, ticks.

A picture is one file without fonts, scripts or links. Colours come from one style sheet, which has
a second set for readers in the dark. Lengths are user units, close to pixels.
"""

import math
from collections.abc import Iterable, Sequence
from xml.sax import saxutils

# Widths of one character by the font size: no sans-serif font that browsers fall back to is wider
# on average, in the words and figures that are written here.
_WIDE, _WIDE_BOLD = 0.6, 0.68


def escape(words: str) -> str:
    """The text as XML takes it: a path may hold characters that no file of XML may."""
    return saxutils.escape("".join(filter(str.isprintable, words)))


def text_width(text: str, size: float, *, bold: bool = False) -> float:
    """An upper estimate of how wide a text is drawn."""
    return len(text) * size * (_WIDE_BOLD if bold else _WIDE)


def fit(text: str, size: float, width: float, *, bold: bool = False) -> str:
    """The text, cut with an ellipsis where it would be wider than `width`."""
    if text_width(text, size, bold=bold) <= width:
        return text
    room = int(width / text_width("x", size, bold=bold)) - 1
    return f"{text[:room].rstrip()}…" if room > 0 else ""


def num(value: float) -> str:
    """A coordinate with as many digits as can be seen."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def attributes(**values: object) -> str:
    """` x="1" y="2"`; an underscore at the end is dropped, others are hyphens."""
    found = []
    for name, value in values.items():
        shown = num(value) if isinstance(value, float) else str(value)
        found.append(f" {name.rstrip('_').replace('_', '-')}={saxutils.quoteattr(shown)}")
    return "".join(found)


def rect(x: float, y: float, width: float, height: float, kind: str, told: str = "") -> str:
    """A rectangle of a class of the style sheet; `told` is shown under the pointer."""
    given = attributes(x=float(x), y=float(y), width=float(width), height=float(height))
    title = f"<title>{escape(told)}</title>" if told else ""
    return f"<rect{given} class={saxutils.quoteattr(kind)}>{title}</rect>"


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """A straight line."""
    given = attributes(x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2))
    return f"<line{given} class={saxutils.quoteattr(kind)}/>"


def text(x: float, y: float, words: str, kind: str, anchor: str = "start") -> str:
    """A text whose base line begins, ends or has its middle at `x`."""
    given = attributes(x=float(x), y=float(y), text_anchor=anchor)
    return f"<text{given} class={saxutils.quoteattr(kind)}>{escape(words)}</text>"


def ticks(end: float, most: int) -> list[float]:
    """Round numbers from 0 up to `end`, at most so many steps: 1, 2 or 5 times a power of ten."""
    if end <= 0:
        return [0.0]
    rough = end / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * (1 - 1e-9))
    return [step * index for index in range(int(end / step * (1 + 1e-9)) + 1)]


def document(
    width: float, height: float, title: str, styles: Sequence[str], parts: Iterable[str]
) -> str:
    """The whole file.

    Args:
        width: Of the view box.
        height: Of the view box.
        title: For readers who do not see it.
        styles: Rules of the style sheet.
        parts: Elements, in the order in which they are painted.
    """
    size = f'width="{num(width)}" height="{num(height)}" viewBox="0 0 {num(width)} {num(height)}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    sheet = "\n".join(styles)
    named = f"<title>{escape(title)}</title>"
    return "\n".join([head, named, f"<style>\n{sheet}\n</style>", *parts, "</svg>", ""])
