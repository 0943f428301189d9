"""The part of a plan's picture that shows a step: a row a lane, its ops over time."""

from collections.abc import Sequence
from dataclasses import replace

from megatrain_cli.report.svg import line, rect, text, text_width, ticks
from megatrain_cli.report.timeline import Bar

_LANE, _LANE_GAP = 28.0, 8.0
_NAMES, _SHARES = 92.0, 104.0  # left and right of the rows
_LABEL, _SMALL = 12.0, 11.0
# What is nearer than this cannot be told apart, and is drawn as one.
_CLOSE, _THIN = 0.4, 1.5

# Of each kind of op: those that compute are warm, those that copy are blue.
COLORS: dict[str, str] = {
    "stream_in": "#3f68c8",
    "fetch": "#2a7ea6",
    "forward": "#4f8a2f",
    "loss": "#b84a62",
    "score": "#a3577f",
    "recompute": "#8c8222",
    "backward": "#b3641f",
    "report": "#5d6b7d",
    "stream_out": "#8457bd",
    "offload": "#5b59c9",
    "accumulate": "#9a5b45",
    "clip": "#5d6b7d",
    "tell": "#5d6b7d",
    "update": "#2e8b7f",
}
# An outline of the same colour shows what is narrower than a pixel.
STYLES = (
    ".op { stroke-width: 0.5; } .odd { opacity: 0.72; }",
    *(f".op-{kind} {{ fill: {color}; stroke: {color}; }}" for kind, color in COLORS.items()),
)

# Every second layer of these is paler: they stand side by side.
_PALE = ("forward", "recompute", "backward", "update")


def draw_time(
    bars: Sequence[Bar],
    step_seconds: float,
    loss_seconds: float,
    top: float,
    across: tuple[float, float],
) -> tuple[list[str], float]:
    """Heading, rows, scale and legend; and where they end.

    Steps are alike: what of a step lasts into the next one is drawn where it was in this one, of
    the step before.

    Args:
        bars: At least one that takes time.
        step_seconds: When the next step begins.
        loss_seconds: When the loss is known.
        top: Where the drawing begins.
        across: Its left edge and its width.
    """
    left, width = across
    x0, rows_width = left + _NAMES, width - _NAMES - _SHARES
    scale = rows_width / step_seconds
    parts = [
        text(left, top + 22, "One step", "head"),
        text(
            left + width, top + 22, f"{step_seconds:.3g} s from one step to the next", "ink", "end"
        ),
    ]
    lanes = list(dict.fromkeys(bar.lane for bar in bars))
    y = first = top + 52
    parts.append(text(left + width, y - 8, "busy", "small", "end"))
    for lane in lanes:
        own = [bar for bar in bars if bar.lane == lane]
        parts.append(text(left, y + 18, lane.replace("_", " "), "ink"))
        parts.append(rect(x0, y, rows_width, _LANE, "track"))
        within = [part for bar in own for part in folded(bar, step_seconds)]
        parts += [_op(bar, x0, y, scale) for bar in merged(within, scale)]
        busy = sum(bar.end - bar.start for bar in own)
        share = f"{_seconds(busy)}, {100 * busy / step_seconds:.0f} %"
        parts.append(text(left + width, y + 18, share, "soft", "end"))
        y += _LANE + _LANE_GAP
    y -= _LANE_GAP
    at = x0 + loss_seconds * scale
    parts.append(line(at, first - 4, at, y, "mark"))
    parts.append(text(at, first - 8, "loss known", "small", "middle"))
    for tick in ticks(step_seconds, 10):
        x = x0 + tick * scale
        parts.append(line(x, y, x, y + 5, "tick"))
        words = f"{tick:.10g} s"
        anchor = "end" if x + text_width(words, _SMALL) / 2 > x0 + rows_width else "middle"
        parts.append(text(x, y + 17, words, "small", anchor))
    drawn, y = _legend(list(dict.fromkeys(bar.kind for bar in bars)), y + 28, x0, rows_width)
    if any(bar.end > step_seconds for bar in bars):
        y += 12
        words = "What lasts into the next step is shown at the beginning: steps are alike."
        drawn.append(text(x0, y, words, "small"))
    return parts + drawn, y


def folded(bar: Bar, period: float) -> list[Bar]:
    """A bar as one or two within the first of equal periods, wherever it begins and ends."""
    begin = bar.start % period
    seconds = min(bar.end - bar.start, period)
    if begin + seconds <= period:
        return [replace(bar, start=begin, end=begin + seconds)]
    return [
        replace(bar, start=begin, end=period),
        replace(bar, start=0.0, end=begin + seconds - period),
    ]


def merged(bars: Sequence[Bar], scale: float) -> list[Bar]:
    """Bars of one lane, those as one that follow each other closely and are of one kind.

    Micro-batches of a layer always; layers only where they are too thin to be seen apart.
    """
    found: list[Bar] = []
    for bar in sorted(bars, key=lambda one: one.start):
        if found and _alike(found[-1], bar, scale) and found[-1].what == bar.what:
            found[-1] = replace(found[-1], end=max(found[-1].end, bar.end))
        else:
            found.append(bar)
    layers: list[Bar] = []
    for bar in found:
        last = layers[-1] if layers else None
        if (
            last is not None
            and _alike(last, bar, scale)
            and min(last.end - last.start, bar.end - bar.start) * scale < _THIN
        ):
            what = f"{last.what.partition(' to ')[0]} to {bar.what.removeprefix('layer ')}"
            layers[-1] = replace(last, end=max(last.end, bar.end), what=what)
        else:
            layers.append(bar)
    return layers


def _alike(last: Bar, bar: Bar, scale: float) -> bool:
    return last.kind == bar.kind and (bar.start - last.end) * scale <= _CLOSE


def _op(bar: Bar, x0: float, y: float, scale: float) -> str:
    seconds = bar.end - bar.start
    where = f", {bar.what}" if bar.what else ""
    told = f"{bar.kind.replace('_', ' ')}{where}: {bar.start:.4g} s to {bar.end:.4g} s"
    odd = " odd" if bar.kind in _PALE and bar.what[-1:] in ("1", "3", "5", "7", "9") else ""
    return rect(x0 + bar.start * scale, y, seconds * scale, _LANE, f"op op-{bar.kind}{odd}", told)


def _seconds(value: float) -> str:
    """Such as `12.3 s`, `1.23 s` or `45.6 ms`."""
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if value >= size:
            return f"{float(f'{value / size:.3g}'):g} {unit}"
    return "0 ms" if value == 0 else "< 1 ms"


def _legend(kinds: Sequence[str], y: float, x0: float, width: float) -> tuple[list[str], float]:
    parts: list[str] = []
    x, base = x0, y + 12
    for kind in kinds:
        words = kind.replace("_", " ")
        needed = 16 + text_width(words, _LABEL) + 18
        if x + needed > x0 + width:
            x, base = x0, base + 19
        parts.append(rect(x, base - 10, 11, 11, f"key op-{kind}"))
        parts.append(text(x + 16, base, words, "ink"))
        x += needed
    return parts, base + 12
