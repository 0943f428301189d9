"""A model card tells how a model was trained, and nothing of the machine it was trained on."""

import math
from dataclasses import replace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.report.loss_chart import loss_chart
from megatrain_cli.report.model_card import CardFacts, model_card, without_places

CONFIG: dict[str, dict[str, object]] = {
    "model": {"path": "/disk/someone/models/tiny-llama", "dtype": "bfloat16"},
    "data": {"train": [{"path": "/data/private/chats.jsonl", "format": None}], "eval": None},
    "train": {"output_dir": "/runs/secret", "max_steps": 20},
    "store": {"memory": None},
}
FACTS = CardFacts(
    name="out",
    architecture="LlamaForCausalLM",
    num_parameters=1_500_000,
    dtype="bfloat16",
    step=20,
    target_steps=40,
    num_rows=80,
    config=CONFIG,
    losses=[(step, 4.0 - step / 10) for step in range(1, 21)],
    checkpoint_id="sha256:abc",
)


def test_the_card_names_model_data_steps_and_losses() -> None:
    text = model_card(FACTS)
    for wanted in ("tiny-llama", "chats.jsonl", "20 of 40", "1.5M", "sha256:abc", "max_steps: 20"):
        assert wanted in text
    assert "| 1 | 3.9000 |" in text
    assert "| 20 | 2.0000 |" in text


def test_no_place_of_the_machine_is_told() -> None:
    text = model_card(FACTS)
    for private in ("/disk", "someone", "/data", "private", "secret"):
        assert private not in text


def test_a_config_keeps_everything_but_places_and_what_was_never_set() -> None:
    assert without_places(CONFIG) == {
        "model": {"path": "tiny-llama", "dtype": "bfloat16"},
        "data": {"train": [{"path": "chats.jsonl"}]},
        "train": {"max_steps": 20},
    }


@pytest.mark.parametrize(
    ("path", "base"), [("org/tiny", "org/tiny"), ("/models/tiny", None), ("tiny", None)]
)
def test_only_the_id_of_a_hub_is_a_base_model_for_machines(path: str, base: str | None) -> None:
    text = model_card(replace(FACTS, config={"model": {"path": path}}))
    head = yaml.safe_load(text.split("---\n")[1])
    assert head.get("base_model") == base


def test_without_losses_there_is_no_chapter_on_them() -> None:
    assert "## Loss" not in model_card(replace(FACTS, losses=[]))


def test_text_from_a_file_cannot_leave_its_block() -> None:
    text = model_card(replace(FACTS, name="a <b>\n# c", config={"x": {"y": "```\n# z"}}))
    assert "# a &lt;b> # c\n" in text
    assert "````yaml\n" in text
    assert text.count("````") == 2


def test_a_name_that_is_no_unicode_is_written_as_far_as_it_goes() -> None:
    """Folders may be named in any bytes; Python has what is none in lone surrogates."""
    assert "\n# caf?\n" in model_card(replace(FACTS, name="caf\udce9")).encode().decode()


points = st.lists(st.tuples(st.integers(1, 10**6), st.floats(width=32)), max_size=50).map(
    lambda found: sorted(found, key=lambda point: point[0])
)


@given(points, st.integers(8, 80), st.integers(2, 20))
def test_a_chart_is_a_rectangle_with_a_mark_for_each_column_that_has_steps(
    losses: list[tuple[int, float]], width: int, height: int
) -> None:
    chart = loss_chart(losses, width, height)
    steps = [step for step, loss in losses if math.isfinite(loss)]
    if not steps:
        assert chart == ""
        return
    lines = chart.splitlines()
    assert len(lines) == height + 2
    curve = [line[12:] for line in lines[:height]]
    assert {len(line) for line in curve} == {width}
    span = max(steps[-1] - steps[0], 1)
    wanted = {(step - steps[0]) * (width - 1) // span for step in steps}
    marked = [at for line in curve for at, sign in enumerate(line) if sign == "*"]
    assert sorted(marked) == sorted(wanted)


def test_a_falling_loss_falls() -> None:
    curve = [line[12:] for line in loss_chart([(1, 3.0), (2, 2.0), (3, 1.0)], 9, 3).splitlines()]
    assert curve[:3] == ["*        ", "    *    ", "        *"]
    assert curve[-1].startswith("step 1")
    assert curve[-1].endswith("3")
