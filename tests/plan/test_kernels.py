"""Kernels that are kept for each length of rows: all shapes are counted once, and not for ever."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.model.spec import ParamSpec
from megatrain_cli.plan.kernels import kernel_bytes, most_lengths, product_shapes
from megatrain_cli.plan.row_facts import RowFacts
from megatrain_cli.units import MIB, show_bytes
from tests.plan.small import CPU, GPU, make_spec, plan_for


def test_layers_of_one_shape_share_their_kernels_and_a_tied_head_has_one() -> None:
    for tied in (False, True):
        spec = make_spec(layers=5, hidden=16, vocab=260, tied=tied)
        assert product_shapes(spec) == {(64, 16), (16, 64), (260, 16)}


def test_no_row_is_multiplied_by_a_table_of_positions() -> None:
    spec = make_spec(tied=True)
    positions = ParamSpec("positions", (1024, 16))
    embed = replace(spec.embed, params=(*spec.embed.params, positions))
    with_table = replace(spec, layers=(embed, *spec.layers[1:]))
    assert product_shapes(with_table) == product_shapes(spec)


def facts(lengths: int = 0, spans: int = 0, targets: int | None = None) -> RowFacts:
    """Of rows that are learnt from end to end, if no targets are given."""
    targets = lengths if targets is None else targets
    return RowFacts(64, 64.0, 0, 0, 1, lengths=lengths, spans=spans, targets=targets)


@given(st.integers(0, 400), st.integers(0, 400), st.booleans())
def test_more_lengths_never_take_less_and_end_where_kernels_are_made_anew(
    lengths: int, spans: int, fused: bool
) -> None:
    spec = make_spec()

    def found(lengths: int, spans: int) -> int:
        return kernel_bytes(spec, facts(lengths, spans), fused=fused)

    here = found(lengths, spans)
    for more in ((lengths + 1, spans), (lengths, spans + 1)):
        assert found(*more) >= here
    most = most_lengths(spec) + 1  # of the last one some kernels are kept
    assert found(most, spans) >= here
    assert found(10**9, spans) == found(most, spans)
    assert found(lengths, 10**9) == found(lengths, 10**6)


@given(st.integers(0, 400), st.integers(0, 400))
def test_three_lengths_that_are_only_evaluated_keep_what_a_trained_one_does(
    lengths: int, evaluated: int
) -> None:
    spec, rows = make_spec(), facts(lengths)
    rows = replace(rows, eval_lengths=3 * evaluated, eval_targets=3 * evaluated)
    found = kernel_bytes(spec, rows, fused=True)
    assert found == kernel_bytes(spec, facts(lengths + evaluated), fused=True)


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_has_kernels_for_numbers_of_targets_and_layers_for_lengths(tied: bool) -> None:
    spec = make_spec(tied=tied)  # two shapes of layers, one of the head
    one, lengths, targets = facts(1), facts(4, targets=1), facts(1, targets=4)
    found = [kernel_bytes(spec, rows, fused=True) for rows in (one, lengths, targets)]
    assert found == [3 * 2 * MIB, (2 * 4 + 1) * 2 * MIB, (2 + 4) * 2 * MIB]


def test_attention_of_one_length_is_billed_with_what_was_measured_on_average() -> None:
    """8.5 MiB, of the worst lengths, had a model of a million parameters planned 11 % too high."""
    assert 4.8 * MIB <= kernel_bytes(make_spec(), facts(spans=1), fused=True) <= 6.6 * MIB


def test_without_rows_there_are_no_kernels_and_eager_attention_has_none() -> None:
    spec, some = make_spec(), facts(spans=5)
    assert kernel_bytes(spec, facts(), fused=True) == 0
    assert kernel_bytes(spec, some, fused=False) == 0 < kernel_bytes(spec, some, fused=True)


FP32 = {"model": {"dtype": "float32"}, "optimizer": {"master": "fp32"}}


def test_a_plan_that_knows_no_rows_says_what_each_length_would_take() -> None:
    spec = make_spec()
    each = show_bytes(kernel_bytes(spec, facts(1, 1), fused=True))
    said = dict(plan_for(spec, CPU).summary)
    assert said["kernels"].startswith(f"{each} for each length of rows")
    for machine, sections in ((GPU, {}), (CPU, FP32)):
        assert "kernels" not in dict(plan_for(spec, machine, sections).summary)
