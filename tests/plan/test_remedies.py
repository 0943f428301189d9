"""What a user is told to change where a run does not fit, by what the config asks for."""

from dataclasses import replace

import pytest

from megatrain_cli.plan.remedies import Way, device_ways, host_ways
from tests.plan.small import CPU, GPU, Sections, make_config, make_spec, plan_for

SPEC = make_spec(hidden=64, layers=5)
ROWS: Sections = {"train": {"micro_batch_size": 1, "gradient_accumulation_steps": 6}}


def advice(sections: Sections, *, device: str = "cuda") -> str:
    """On the place that holds activations."""
    tiny = replace(GPU if device == "cuda" else CPU, host_bytes=0, device_bytes=0)
    return plan_for(SPEC, tiny, sections).shortfalls[-1]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_layers_fetched_further_ahead_than_the_next_are_named(device: str) -> None:
    for asked, wanted in ((4, 2), (2, 1)):
        line = advice({"pipeline": {"staging_buffers": asked}}, device=device)
        assert f" `pipeline.staging_buffers: {wanted}` frees " in line
    assert "staging_buffers" not in advice({"pipeline": {"staging_buffers": 1}}, device=device)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_half_of_the_rows_are_named_with_the_key_that_has_them(device: str) -> None:
    assert " `train.gradient_accumulation_steps: 3` frees " in advice(ROWS, device=device)
    whole: Sections = {"train": {"micro_batch_size": 6}}
    assert " `train.micro_batch_size: 3` frees " in advice(whole, device=device)
    one: Sections = {"train": {"micro_batch_size": 1}}
    assert "fewer rows a step" not in advice(one, device=device)


def test_fewer_rows_teach_otherwise_and_the_same_rows_divided_do_not() -> None:
    config = make_config({"train": {"micro_batch_size": 4, "gradient_accumulation_steps": 6}})
    split, fewer = (
        next(way for way in device_ways(config, 64) if way.price == price)
        for price in ("the updates stay the same", "fewer rows a step")
    )
    assert split.learns_the_same(config)
    assert not fewer.learns_the_same(config)


def test_float32_on_a_gpu_is_named() -> None:
    exact: Sections = {"model": {"dtype": "float32"}, "optimizer": {"master": "fp32"}}
    assert " `model.dtype: bfloat16` with `optimizer.master: fp32_split` frees " in advice(exact)
    assert "model.dtype" not in advice({})


@pytest.mark.parametrize(
    ("overlong", "price"),
    [("truncate", " (longer rows are cut)"), ("drop", " (longer rows are left out)")],
)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_shorter_rows_cost_what_is_done_with_longer_ones(
    overlong: str, price: str, device: str
) -> None:
    line = advice({"data": {"overlong": overlong}}, device=device)
    assert " `data.max_length: 32` frees " in line
    assert price in line
    assert "data.max_length" not in advice({"data": {"overlong": "error"}}, device=device)


def test_eager_updates_cost_clipping_where_there_is_some() -> None:
    def eager(norm: float | None) -> Way:
        config = make_config({"optimizer": {"max_grad_norm": norm}})
        ways = host_ways(config, 64, on_gpu=True)
        return next(way for way in ways if way.changes.get("optimizer.update") == "eager")

    assert [eager(norm).price for norm in (1.0, None)] == ["no clipping", ""]
