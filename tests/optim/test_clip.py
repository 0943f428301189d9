"""The norm is that of all gradients together; the coefficient is torch's."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.optim.clip import clip_coefficient, global_norm


@given(
    st.lists(st.lists(st.floats(-10, 10, width=32), min_size=1), min_size=1, max_size=5),
    st.floats(0.01, 10),
)
def test_clipping_equals_torch(layers: list[list[float]], max_norm: float) -> None:
    parameters = [torch.zeros(len(layer), requires_grad=True) for layer in layers]
    for parameter, layer in zip(parameters, layers, strict=True):
        parameter.grad = torch.tensor(layer)
    norm = global_norm(math.fsum(x * x for x in layer) for layer in layers)
    expected = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    assert norm == pytest.approx(expected.item(), rel=1e-5, abs=1e-12)
    coefficient = clip_coefficient(norm, max_norm)
    for parameter, layer in zip(parameters, layers, strict=True):
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad, torch.tensor(layer) * coefficient, rtol=1e-5)


def test_without_a_limit_nothing_is_scaled() -> None:
    assert clip_coefficient(1e9, None) == 1.0


def test_a_norm_that_is_not_finite_does_not_look_harmless() -> None:
    assert math.isnan(global_norm([1.0, math.nan, 2.0]))
    assert math.isnan(clip_coefficient(math.nan, 1.0))
    assert global_norm([1.0, math.inf]) == math.inf
    assert clip_coefficient(math.inf, 1.0) == 0.0


def test_sums_are_added_in_layer_order() -> None:
    sums = [1e16, 1.0, 1.0]
    assert global_norm(sums) ** 2 == pytest.approx(1e16)
    assert global_norm(reversed(sums)) == math.sqrt(1.0 + 1.0 + 1e16)
