"""A step as a picture in text: where a lane works, its letter; where it waits, a dot."""

from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.pipeline.ops import LETTERS, Kind
from megatrain_cli.report.timeline import Bar, draw_timeline

BARS = [
    Bar("stream_in", "stream_in", 0.0, 2.0),
    Bar("compute", "forward", 2.0, 6.0),
    Bar("compute", "backward", 6.0, 10.0),
    Bar("stream_in", "fetch", 4.0, 5.0),
]


def test_each_lane_is_a_line_with_a_scale_and_a_legend() -> None:
    assert draw_timeline(BARS, LETTERS, width=10).splitlines() == [
        "stream_in |ii..f.....|",
        "compute   |..FFFFBBBB|",
        "           0 s   10 s",
        "i stream_in, F forward, B backward, f fetch, . idle",
    ]


def test_each_kind_has_a_letter_of_its_own() -> None:
    assert set(LETTERS) == set(Kind)
    assert len(set(LETTERS.values())) == len(LETTERS)


spans = st.tuples(st.floats(0, 100), st.floats(0.01, 50))


@given(st.lists(spans, min_size=1, max_size=20), st.integers(5, 60))
def test_a_line_has_its_width_whatever_overlaps(
    found: list[tuple[float, float]], width: int
) -> None:
    bars = [Bar("update", "update", start, start + seconds) for start, seconds in found]
    row = draw_timeline(bars, LETTERS, width).splitlines()[0].partition("|")[2]
    assert len(row) == width + 1
    assert set(row[:-1]) <= {"U", "."}
