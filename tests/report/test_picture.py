"""The picture of a plan: true to scale, nothing lost, no word over another, whatever is planned."""

import re
from dataclasses import dataclass, replace
from itertools import combinations
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain_cli.pipeline.ops import Kind
from megatrain_cli.plan.memory import DEVICE, PlanLine
from megatrain_cli.report.picture import MARGIN, Memory, Step, draw_picture
from megatrain_cli.report.picture_time import COLORS, folded, merged
from megatrain_cli.report.svg import fit, text_width, ticks
from megatrain_cli.report.timeline import Bar
from megatrain_cli.train.drawing import draw_plan
from megatrain_cli.train.forecast import forecast
from megatrain_cli.units import show_bytes
from tests.plan.small import CPU, GPU, RATES, make_spec, plan_for

_NAME = "{http://www.w3.org/2000/svg}"


@dataclass(frozen=True)
class Box:
    """What a word or a rectangle covers."""

    left: float
    right: float
    top: float
    bottom: float
    words: str = ""

    def meets(self, other: "Box") -> bool:
        apart = self.right <= other.left or other.right <= self.left
        return not (apart or self.bottom <= other.top or other.bottom <= self.top)


class Picture:
    """A picture as it is read again."""

    def __init__(self, drawn: str) -> None:
        self.root = ET.fromstring(drawn)  # well formed, or it raises
        self.width, self.height = map(float, self.root.attrib["viewBox"].split()[2:])
        style = self.root.findtext(f"{_NAME}style") or ""
        rules = re.findall(r"\.([\w-]+) \{ ([^}]*font-size[^}]*) \}", style)
        self._fonts = {
            name: (float(re.findall(r"font-size: (\d+)px", rule)[0]), "weight" in rule)
            for name, rule in rules
        }

    def texts(self) -> list[Box]:
        found = []
        for one in self.root.iter(f"{_NAME}text"):
            words = one.text or ""
            size, bold = self._fonts[one.attrib["class"]]
            width = text_width(words, size, bold=bold)
            before = {"start": 0.0, "middle": width / 2, "end": width}[one.attrib["text-anchor"]]
            x, y = float(one.attrib["x"]) - before, float(one.attrib["y"])
            found.append(Box(x, x + width, y - 0.8 * size, y + 0.2 * size, words))
        return found

    def rects(self, kind: str) -> list[Box]:
        """Of a class, with what they tell under the pointer."""
        found = []
        for one in self.root.iter(f"{_NAME}rect"):
            if kind in one.attrib["class"].split():
                x, y, width, height = (float(one.attrib[k]) for k in ("x", "y", "width", "height"))
                told = one.findtext(f"{_NAME}title") or ""
                found.append(Box(x, x + width, y, y + height, told))
        return found

    def check(self) -> None:
        """All within the picture's margins, and no word over another."""
        texts = self.texts()
        for box in [*texts, *self.rects("part"), *self.rects("op"), *self.rects("key")]:
            assert box.left >= MARGIN - 0.01, box
            assert box.right <= self.width - MARGIN + 0.05, box
            assert box.top >= 0, box
            assert box.bottom <= self.height, box
        assert [pair for pair in combinations(texts, 2) if pair[0].meets(pair[1])] == []


owners = st.text(st.characters(codec="utf-8", categories=["L", "N", "P"]), min_size=1, max_size=40)
plan_lines = st.builds(
    PlanLine,
    owners,
    st.sampled_from(["host pinned", "host pageable"]),
    st.integers(1, 1 << 42),
    st.just("2 B x parameters"),
)
memories = st.builds(
    Memory,
    st.sampled_from(["host RAM", "GPU memory"]),
    st.integers(1, 1 << 43),
    st.lists(plan_lines, min_size=1, max_size=14, unique_by=lambda one: one.owner),
)


@settings(max_examples=15)
@given(st.text(min_size=1, max_size=200), st.lists(memories, min_size=1, max_size=2))
def test_parts_are_as_wide_as_their_bytes_and_all_are_named(
    title: str, memory: list[Memory]
) -> None:
    picture = Picture(draw_picture(title, "FITS", ["one fact"], memory, None))
    picture.check()
    parts = iter(picture.rects("part"))
    words = [box.words for box in picture.texts()]
    for one in memory:
        scale = 1064 / max(one.limit, one.needed)
        for line in sorted(one.lines, key=lambda found: "pinned" not in found.place):
            part = next(parts)
            assert part.right - part.left == pytest.approx(line.num_bytes * scale, abs=0.011)
            assert part.words.startswith(f"{line.owner}: {show_bytes(line.num_bytes)}")
            assert show_bytes(line.num_bytes) in words
            shown = f"{line.owner}, page-locked" if "pinned" in line.place else line.owner
            assert any(shown.startswith(w.removesuffix("…")) for w in words if w)
    assert next(parts, None) is None
    assert len(picture.rects("over")) == sum(one.needed > one.limit for one in memory)


_KINDS = st.sampled_from(["forward", "backward", "update", "stream_in"])


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(_KINDS, st.integers(0, 90), st.floats(0, 3), st.floats(1e-6, 1)),
        min_size=1,
        max_size=30,
    ),
    st.floats(1, 4),
    st.floats(0, 1),
)
def test_ops_are_as_wide_as_their_seconds_and_all_lanes_are_there(
    found: list[tuple[str, int, float, float]], period: float, loss: float
) -> None:
    bars = [
        Bar(f"lane_{kind}", kind, start, start + seconds, f"layer {layer}")
        for kind, layer, start, seconds in found
    ]
    gpu = Memory("GPU memory", 1 << 40, [PlanLine("weights", "device", 1 << 38, "all")])
    picture = Picture(draw_picture("x", "FITS", [], [gpu], Step(bars, period, loss * period)))
    picture.check()
    words = {box.words for box in picture.texts()}
    assert {f"lane {bar.kind.replace('_', ' ')}" for bar in bars} <= words
    assert {bar.kind.replace("_", " ") for bar in bars} <= words
    scale = (1064 - 92 - 104) / period
    covered = {  # what of a lane's time is covered: bars of one lane may lie over one another here
        lane: _covered([p for bar in bars if bar.lane == lane for p in folded(bar, period)])
        for lane in dict.fromkeys(bar.lane for bar in bars)
    }
    drawn = [_covered_boxes(picture, track) for track in picture.rects("track")]
    for seconds, width in zip(covered.values(), drawn, strict=True):
        assert width == pytest.approx(seconds * scale, abs=0.45 * len(bars))


def _covered(bars: list[Bar]) -> float:
    return _length([(bar.start, bar.end) for bar in bars])


def _covered_boxes(picture: Picture, track: Box) -> float:
    return _length([(o.left, o.right) for o in picture.rects("op") if o.top == track.top])


def _length(spans: list[tuple[float, float]]) -> float:
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def test_long_names_and_all_kinds_of_ops_find_their_places() -> None:
    lines = [PlanLine(f"{'owner ' * 8}{i}", "host pinned", 1 << 30, "all") for i in range(8)]
    bars = [Bar(kind, kind, float(i), i + 1.0, f"layer {i}") for i, kind in enumerate(COLORS)]
    memory = [Memory("host RAM", 8 << 30, lines)]  # the last tick is at the very end
    Picture(draw_picture("x" * 300, "y" * 300, ["z " * 300], memory, Step(bars, 10, 9.99))).check()


def test_micro_batches_of_a_layer_are_one_and_thin_layers_too() -> None:
    bars = [Bar("c", "forward", i, i + 1.0, f"layer {i // 4}") for i in range(8)]

    def seen(scale: float) -> list[tuple[float, float, str]]:
        return [(bar.start, bar.end, bar.what) for bar in merged(bars, scale)]

    # Micro-batches that are too thin do not make their layers so.
    assert seen(10.0) == seen(0.5) == [(0, 4.0, "layer 0"), (4, 8.0, "layer 1")]
    assert seen(0.1) == [(0, 8.0, "layer 0 to 1")]


def test_what_lasts_into_the_next_step_is_drawn_at_the_beginning() -> None:
    parts = folded(Bar("update", "update", 1.5, 2.5), 2.0)
    assert [(part.start, part.end) for part in parts] == [(1.5, 2.0), (0.0, 0.5)]
    (later,) = folded(Bar("update", "update", 5.0, 5.5), 2.0)
    assert (later.start, later.end) == (1.0, 1.5)


@pytest.mark.parametrize("layers", [28, 80])
def test_a_plan_of_many_layers_is_drawn_whole(layers: int) -> None:
    sections: dict[str, dict[str, object]] = {"train": {"gradient_accumulation_steps": 3}}
    machine = replace(GPU, rates=RATES, host_bytes=8 << 30, device_bytes=4 << 30)
    spec = make_spec(layers=layers, hidden=512)
    plan = plan_for(spec, machine, sections, can_pin=False)  # with slabs, so that all lanes work
    drawn = draw_plan("some-model", spec, plan, forecast(plan, spec, 1))
    picture = Picture(drawn)
    picture.check()
    words = [box.words for box in picture.texts()]
    for line in plan.lines:
        assert words.count(show_bytes(line.num_bytes)) >= 1
        assert any(line.owner in w for w in words), line.owner
    assert {"stream in", "compute", "stream out", "host", "update"} <= set(words)
    assert len(drawn) < 400_000
    assert len(picture.rects("part")) == len(plan.lines)
    assert {line.place for line in plan.lines} >= {DEVICE, "host pageable"}


def test_without_rates_there_is_no_timeline_and_the_picture_says_why() -> None:
    spec = make_spec()
    picture = Picture(draw_plan("some-model", spec, plan_for(spec, CPU), None))
    picture.check()
    assert any(box.words.startswith("No timeline: ") for box in picture.texts())
    assert picture.rects("op") == []


def test_each_kind_has_a_colour() -> None:
    assert set(COLORS) == set(Kind)


@given(st.floats(1e-6, 1e6), st.integers(2, 12))
def test_ticks_are_few_and_reach_far(end: float, most: int) -> None:
    found = ticks(end, most)
    assert len(found) <= most + 1
    assert found[-1] <= end * (1 + 1e-6)
    assert len(found) == 1 or found[-1] > end / 2 - 1e-9


def test_a_long_text_is_cut_to_its_width() -> None:
    assert fit("abc", 12, 100) == "abc"
    assert text_width(fit("a" * 500, 12, 100), 12) <= 100
    assert fit("abc", 12, 1) == ""
