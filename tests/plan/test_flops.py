"""Operations of a layer, counted as in the papers and against counting one by one."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.model.spec import ModelSpec
from megatrain_cli.plan.flops import layer_flops, visible_pairs
from tests.plan.small import make_spec, specs


@given(st.integers(1, 60), st.none() | st.integers(1, 70))
def test_pairs_are_those_that_a_mask_lets_through(length: int, window: int | None) -> None:
    pairs = [
        (late, early)
        for late in range(length)
        for early in range(late + 1)
        if window is None or late - early < window
    ]
    assert visible_pairs(length, window) == len(pairs)


@given(specs, st.integers(1, 4), st.integers(1, 32))
def test_without_attention_backward_is_twice_forward_and_all_is_6_a_parameter_and_token(
    spec: ModelSpec, rows: int, length: int
) -> None:
    flops = [
        layer_flops(spec, layer, rows, length, whole=False) for layer in range(len(spec.layers))
    ]
    assert all(one.backward == 2 * one.forward for one in flops)
    multiplied = spec.num_parameters - (0 if spec.tied else spec.embed.numel)
    total = sum(one.forward + one.backward for one in flops)
    assert total == pytest.approx(6 * multiplied * rows * length)


def test_attention_grows_with_the_square_of_the_length() -> None:
    spec = replace(make_spec(hidden=16), attention_width=16)

    def attention(length: int) -> float:
        with_it = layer_flops(spec, 1, 1, length, whole=True).forward
        return with_it - layer_flops(spec, 1, 1, length, whole=False).forward

    assert attention(64) == 4 * 16 * 64 * 65 / 2
    assert attention(4096) / attention(64) == pytest.approx(64**2, rel=0.02)


def test_layers_that_see_all_have_no_window() -> None:
    spec = replace(make_spec(), attention_width=16, window=8)
    short, *_ = spec.decoder_layers
    mixed = replace(spec, layers=(spec.embed, short, replace(short, sees_all=True), spec.head))
    windowed, whole = (layer_flops(mixed, layer, 1, 64, whole=True).forward for layer in (1, 2))
    unlimited = layer_flops(replace(mixed, window=None), 1, 1, 64, whole=True).forward
    assert windowed < whole == unlimited
