"""Kernels that are kept for each length of rows: all shapes are counted once, and not for ever."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.model.spec import ParamSpec
from megatrain_cli.plan.kernels import kernel_bytes, most_lengths, product_shapes
from tests.plan.small import make_spec


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


@given(st.integers(0, 400), st.integers(0, 400), st.booleans())
def test_more_lengths_never_take_less_and_end_where_kernels_are_made_anew(
    lengths: int, spans: int, fused: bool
) -> None:
    spec = make_spec()
    here = kernel_bytes(spec, lengths, spans, fused=fused)
    for more in ((lengths + 1, spans), (lengths, spans + 1)):
        assert kernel_bytes(spec, *more, fused=fused) >= here
    most = most_lengths(spec) + 1  # of the last one some kernels are kept
    assert kernel_bytes(spec, most, spans, fused=fused) >= here
    assert kernel_bytes(spec, 10**9, spans, fused=fused) == kernel_bytes(
        spec, most, spans, fused=fused
    )
    assert kernel_bytes(spec, lengths, 10**9, fused=fused) == kernel_bytes(
        spec, lengths, 10**6, fused=fused
    )


@given(st.integers(0, 400), st.integers(0, 400))
def test_three_lengths_that_are_only_evaluated_keep_what_a_trained_one_does(
    lengths: int, evaluated: int
) -> None:
    spec = make_spec()
    found = kernel_bytes(spec, lengths, 0, fused=True, eval_lengths=3 * evaluated)
    assert found == kernel_bytes(spec, lengths + evaluated, 0, fused=True)


def test_without_rows_there_are_no_kernels_and_eager_attention_has_none() -> None:
    spec = make_spec()
    assert kernel_bytes(spec, 0, 0, fused=True) == 0
    assert kernel_bytes(spec, 0, 5, fused=False) == 0 < kernel_bytes(spec, 0, 5, fused=True)
