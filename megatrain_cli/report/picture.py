"""A plan as one picture: who owns which bytes of each place, and what each lane does in a step.

What is drawn is true to scale: a part's width is its share of the place, an op's its share of the
time. What is too narrow to be seen has its number in the legend all the same.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatrain_cli.report.picture_time import STYLES, draw_time
from megatrain_cli.report.plan_view import PlanLineView
from megatrain_cli.report.svg import document, fit, line, rect, text, text_width, ticks
from megatrain_cli.report.timeline import Bar
from megatrain_cli.units import GIB, show_bytes

WIDTH, MARGIN = 1120.0, 28.0
_INNER = WIDTH - 2 * MARGIN

_BAR = 44.0  # height of a place's bar
_COLUMNS, _COLUMN_GAP, _ROW = 3, 30.0, 20.0  # of its legend
_LABEL, _SMALL = 12.0, 11.0  # sizes of type

# Middle tones, so that white type can be read on them and they stand out on white and on black.
_PARTS = (
    *("#3f68c8", "#2e8b7f", "#b3641f", "#8457bd", "#b84a62", "#4f8a2f"),
    *("#2a7ea6", "#a3577f", "#7a7420", "#5d6b7d", "#9a5b45", "#5b59c9"),
    *("#946f12", "#377d4f", "#bf5590", "#4a6fa0"),
)

_STYLES = (
    'text { font-family: system-ui, "Segoe UI", Roboto, Helvetica, Arial, sans-serif; }',
    ".page { fill: #ffffff; }",
    ".ink { fill: #1b2330; font-size: 12px; } .soft { fill: #5b6675; font-size: 12px; }",
    ".small { fill: #5b6675; font-size: 11px; }",
    ".title { fill: #1b2330; font-size: 20px; font-weight: 600; }",
    ".head { fill: #1b2330; font-size: 14px; font-weight: 600; }",
    ".verdict { fill: #1b2330; font-size: 13px; font-weight: 600; }",
    ".missing { fill: #c0322b; font-size: 13px; font-weight: 600; }",
    ".on { fill: #ffffff; font-size: 11px; font-weight: 600; pointer-events: none; }",
    ".on-soft { fill: #ffffff; font-size: 11px; pointer-events: none; }",
    ".free, .track { fill: #eef1f5; }",
    ".over { fill: none; stroke: #c0322b; stroke-width: 2; }",
    ".limit { stroke: #1b2330; stroke-width: 2; } .gap { stroke: #ffffff; stroke-width: 1; }",
    ".tick { stroke: #c9d0da; stroke-width: 1; }",
    ".mark { stroke: #5b6675; stroke-width: 1; stroke-dasharray: 4 3; }",
    *(f".part-{index} {{ fill: {color}; }}" for index, color in enumerate(_PARTS)),
    *STYLES,
    "@media (prefers-color-scheme: dark) {",
    "  .page { fill: #0f141b; } .gap { stroke: #0f141b; }",
    "  .ink, .title, .head, .verdict { fill: #e8edf4; } .soft, .small { fill: #9aa6b5; }",
    "  .missing { fill: #ff8078; } .over { stroke: #ff8078; } .limit { stroke: #e8edf4; }",
    "  .free, .track { fill: #1d2530; } .tick { stroke: #394454; } .mark { stroke: #9aa6b5; }",
    "}",
)


@dataclass(frozen=True)
class Memory:
    """One place, and what it holds.

    Attributes:
        name: Such as `host RAM`.
        limit: Bytes that may be taken.
        lines: Its rows of the bill, in their order.
    """

    name: str
    limit: int
    lines: Sequence[PlanLineView]

    @property
    def needed(self) -> int:
        """All bytes of its lines."""
        return sum(line.num_bytes for line in self.lines)


@dataclass(frozen=True)
class Step:
    """One step among others like it.

    Attributes:
        bars: Its ops, with their times; they may end in the next step.
        seconds: From one step to the next.
        loss_seconds: When the loss is known.
    """

    bars: Sequence[Bar]
    seconds: float
    loss_seconds: float


def draw_picture(
    title: str,
    verdict: str,
    facts: Sequence[str],
    memory: Sequence[Memory],
    step: Step | None,
    notes: Sequence[str] = (),
) -> str:
    """The picture as the text of an SVG file.

    Args:
        title: What was planned, for what.
        verdict: Whether it fits.
        facts: Lines below the title.
        memory: The places.
        step: A step that was played; None where no rates are known, which is then said.
        notes: Lines at the end.
    """
    parts = [text(MARGIN, 42, fit(title, 20, _INNER, bold=True), "title")]
    kind = "missing" if any(one.needed > one.limit for one in memory) else "verdict"
    parts.append(text(MARGIN, 66, fit(verdict, 13, _INNER, bold=True), kind))
    y = 66.0
    for fact in facts:
        for row in _wrapped(fact, _LABEL):
            y += 19
            parts.append(text(MARGIN, y, row, "soft"))
    y += 18
    for one in memory:
        drawn, y = _draw_memory(one, y)
        parts += drawn
    if step is None:
        parts.append(text(MARGIN, y + 22, "One step", "head"))
        why = "No timeline: rates of this machine are not known. `megatrain probe` measures them."
        parts.append(text(MARGIN, y + 44, why, "soft"))
        y += 56
    else:
        drawn, y = draw_time(step.bars, step.seconds, step.loss_seconds, y, (MARGIN, _INNER))
        parts += drawn
    y += 4
    for note in notes:
        for row in _wrapped(note, _SMALL):
            y += 17
            parts.append(text(MARGIN, y, row, "small"))
    height = y + 24
    return document(WIDTH, height, title, _STYLES, [rect(0, 0, WIDTH, height, "page"), *parts])


def _wrapped(words: str, size: float) -> list[str]:
    return textwrap.wrap(words, int(_INNER / text_width("x", size)))


def _draw_memory(memory: Memory, top: float) -> tuple[list[str], float]:
    """Heading, bar, scale and legend of a place; and where they end."""
    limit, needed = memory.limit, memory.needed
    # Page-locked parts stand together, at the beginning.
    lines = sorted(memory.lines, key=lambda one: not _pinned(one))
    scale = _INNER / max(limit, needed, 1)
    parts = [text(MARGIN, top + 22, memory.name[:1].upper() + memory.name[1:], "head")]
    rest = f"{show_bytes(limit - needed)} free" if needed <= limit else ""
    rest = rest or f"{show_bytes(needed - limit)} missing"
    locked = sum(one.num_bytes for one in lines if _pinned(one))
    locked_text = f", {show_bytes(locked)} of it page-locked" if locked else ""
    told = f"{show_bytes(needed)} of {show_bytes(limit)} needed{locked_text}; {rest}"
    kind = "missing" if needed > limit else "ink"
    parts.append(text(MARGIN + _INNER, top + 22, told, kind, "end"))
    bar, x = top + 32, MARGIN
    parts.append(rect(MARGIN, bar, _INNER, _BAR, "free"))
    edges = []
    for index, one in enumerate(lines):
        width = one.num_bytes * scale
        told = f"{one.owner}: {show_bytes(one.num_bytes)}, {one.formula}"
        parts.append(rect(x, bar, width, _BAR, f"part part-{index % len(_PARTS)}", told))
        parts += _label(x, bar, width, one)
        x += width
        edges.append(x)
    parts += [  # between parts that can be told apart
        line(left, bar, left, bar + _BAR, "gap")
        for left, right in pairwise((MARGIN, *edges))
        if left > MARGIN and right - left > 3
    ]
    free = _INNER - (x - MARGIN)
    if needed <= limit and text_width(rest, _SMALL) + 16 < free:
        parts.append(text(x + 8, bar + 27, rest, "small"))
    if needed > limit:
        at = MARGIN + limit * scale
        parts.append(rect(at, bar, MARGIN + _INNER - at, _BAR, "over", f"beyond the limit: {rest}"))
        parts.append(line(at, bar - 5, at, bar + _BAR + 5, "limit"))
    y = bar + _BAR
    parts += _scale(max(limit, needed), scale, y)
    y += 26
    return parts + _legend(lines, y), y + _ROW * -(-len(lines) // _COLUMNS) + 12


def _pinned(one: PlanLineView) -> bool:
    return "pinned" in one.place


def _label(x: float, bar: float, width: float, one: PlanLineView) -> list[str]:
    """The owner and its bytes on its part, where there is room."""
    size = show_bytes(one.num_bytes)
    needed = max(text_width(one.owner, _SMALL, bold=True), text_width(size, _SMALL))
    if needed + 12 > width:
        return []
    return [
        text(x + 7, bar + 19, one.owner, "on"),
        text(x + 7, bar + 34, size, "on-soft"),
    ]


def _scale(end: int, scale: float, y: float) -> list[str]:
    """Round numbers of GiB below a bar."""
    parts = []
    for tick in ticks(end / GIB, 8):
        x = MARGIN + tick * GIB * scale
        parts.append(line(x, y, x, y + 4, "tick"))
        words = f"{tick:g} GiB"
        half = text_width(words, _SMALL) / 2
        anchor = "start" if x - half < MARGIN else "middle"
        if x + half > MARGIN + _INNER:
            anchor = "end"
        parts.append(text(x, y + 16, words, "small", anchor))
    return parts


def _legend(lines: Sequence[PlanLineView], y: float) -> list[str]:
    """Colour, owner and bytes of every part."""
    parts = []
    width = (_INNER - (_COLUMNS - 1) * _COLUMN_GAP) / _COLUMNS
    for index, one in enumerate(lines):
        row, column = divmod(index, _COLUMNS)
        x, base = MARGIN + column * (width + _COLUMN_GAP), y + row * _ROW + 12
        size = show_bytes(one.num_bytes)
        parts.append(rect(x, base - 10, 11, 11, f"key part-{index % len(_PARTS)}"))
        owner = f"{one.owner}, page-locked" if _pinned(one) else one.owner
        room = width - 18 - 12 - text_width(size, _LABEL)
        parts.append(text(x + 18, base, fit(owner, _LABEL, room), "ink"))
        parts.append(text(x + width, base, size, "soft", "end"))
    return parts
