"""AdamW on tiles: torch's numbers, the reference's bits, for every way to keep a master.

The reference is `optim.reference`, plain torch on whole tensors; it is itself held to
`torch.optim.AdamW` here.
"""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.errors import InternalError
from megatrain_cli.model.layout import make_layout
from megatrain_cli.model.spec import LayerSpec, ParamSpec
from megatrain_cli.optim import kernels
from megatrain_cli.optim.adamw import ALL_FORMATS, AdamStep, update_range
from megatrain_cli.optim.reference import adamw_reference, nearest_bf16, stochastic_bf16
from megatrain_cli.plan.tiles import TileFormat
from megatrain_cli.store.master import LayerTile, MasterStore
from megatrain_cli.store.split import join_fp32

SPLIT, BF16, STOCHASTIC, BOTH, FP32 = ALL_FORMATS
SIZES = [1, 7, 8, 9, 31, 1025]


def make_tile(numel: int, fmt: TileFormat) -> LayerTile:
    layout = make_layout(LayerSpec("layer-00000", "layer", (ParamSpec("weight", (numel,)),)))
    return MasterStore((layout,), fmt).tiles[0]


def fill_tile(tile: LayerTile, master: torch.Tensor, step: int = 0) -> None:
    """Masters as given; moments as if `step` updates had been made."""
    numel = master.numel()
    tile.write_master("weight", master)
    if step:
        tile.exp_avg[:numel] = torch.randn(numel) * 1e-2
        tile.exp_avg_sq[:numel] = torch.rand(numel) * 1e-4


def a_step(step: int = 1, **changes: float) -> AdamStep:
    values = {"lr": 1e-2, "beta1": 0.8, "beta2": 0.9, "eps": 1e-3, "weight_decay": 0.1} | changes
    return AdamStep(step=step, seed=5, **values)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize(
    "fmt", [FP32, BOTH, SPLIT], ids=lambda fmt: f"{fmt.compute_dtype}-{fmt.master}"
)
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("first", [1, 1000])
def test_twenty_updates_equal_torch(fmt: TileFormat, numel: int, first: int) -> None:
    torch.manual_seed(numel)
    tile = make_tile(numel, fmt)
    fill_tile(tile, torch.randn(numel), first - 1)
    parameter = tile.read_master("weight").requires_grad_()
    optimizer = torch.optim.AdamW(
        [parameter], lr=1e-2, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1, foreach=False
    )
    optimizer.state[parameter] = {
        "step": torch.tensor(float(first - 1)),
        "exp_avg": tile.exp_avg[:numel].clone(),
        "exp_avg_sq": tile.exp_avg_sq[:numel].clone(),
    }
    for step in range(first, first + 20):
        gradient = (torch.randn(numel) * 1e-2).to(tile.weights.dtype)
        parameter.grad = gradient.float() * 0.5
        optimizer.step()
        update_range(tile, gradient, 0, a_step(step, grad_scale=0.5), decay=True)
    state = optimizer.state[parameter]
    # Torch may fuse multiplications and additions, so the last bits differ: 1e-6 relative, and of
    # a typical value where a sum of both signs comes out near zero.
    for ours, theirs in (
        (tile.read_master("weight"), parameter.detach()),
        (tile.exp_avg[:numel], state["exp_avg"]),
        (tile.exp_avg_sq[:numel], state["exp_avg_sq"]),
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6 * theirs.abs().max().item())


@pytest.mark.parametrize("fmt", ALL_FORMATS, ids=lambda fmt: f"{fmt.compute_dtype}-{fmt.master}")
@pytest.mark.parametrize("numel", [*SIZES, 3000])
@pytest.mark.parametrize("beta1", [0.0, 0.3, 0.9])
def test_the_kernel_equals_the_reference_bit_for_bit(
    fmt: TileFormat, numel: int, beta1: float
) -> None:
    torch.manual_seed(numel)
    tile = make_tile(numel, fmt)
    fill_tile(tile, torch.randn(numel) * 0.02)
    for step_number in (1, 2, 3, 1000):
        step = a_step(step_number, beta1=beta1, lr=3e-4, eps=1e-8, grad_scale=0.7)
        gradient = (torch.randn(numel) * 10.0 ** torch.randint(-9, 2, (numel,))).to(
            tile.weights.dtype
        )
        master, m, v = adamw_reference(
            tile.read_master("weight"),
            gradient,
            tile.exp_avg[:numel],
            tile.exp_avg_sq[:numel],
            step,
            decay=True,
        )
        update_range(tile, gradient, 0, step, decay=True)
        assert torch.equal(bits(tile.exp_avg[:numel]), bits(m))
        assert torch.equal(bits(tile.exp_avg_sq[:numel]), bits(v))
        weights = {
            "fp32_split": nearest_bf16(master),
            "bf16": master.to(torch.bfloat16),
            "bf16_stochastic": stochastic_bf16(master, step.rounding_key(0)),
            "fp32": master.to(tile.weights.dtype),
        }[fmt.master]
        assert torch.equal(bits(tile.weights[:numel]), bits(weights))
        if fmt.master.startswith("fp32"):
            assert torch.equal(bits(tile.read_master("weight")), bits(master))
        for start, end in tile.layout.gaps:
            assert not tile.weights[start:end].any()


def hostile_values(numel: int) -> torch.Tensor:
    """Masters at the edges: exact ties, one off a tie, subnormals, huge values, both signs."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(-(1 << 31), 1 << 31, (numel,), generator=generator).to(torch.int32)
    high, low = patterns & ~0xFFFF, patterns & 0xFFFF
    low[0::4] = 0x8000
    low[1::4] = 0x7FFF
    high[2::4] &= ~0x7F800000  # subnormals and zeros
    values = (high | low).view(torch.float32)
    return torch.where(values.isfinite(), values, torch.tensor(1.0))


def test_fp32_split_is_an_fp32_master_rounded_to_nearest_over_a_thousand_updates() -> None:
    torch.manual_seed(1)
    numel = 640
    tile = make_tile(numel, SPLIT)
    master = hostile_values(numel)
    tile.write_master("weight", master)
    m, v = torch.zeros(numel), torch.zeros(numel)
    for number in range(1, 1001):
        # Large steps cross zero and powers of two; tiny ones live in the remainder alone.
        step = a_step(number, lr=10.0 ** (number % 7 - 6), weight_decay=0.1, eps=1e-8, beta1=0.5)
        gradient = (torch.randn(numel) * 10.0 ** torch.randint(-20, 4, (numel,))).bfloat16()
        if number % 10 == 0:
            # Straight onto ties: masters that end in 0x8000.
            ties = (master.view(torch.int32) & ~0xFFFF | 0x8000).view(torch.float32)
            master = torch.where(ties.isfinite(), ties, master)
            tile.write_master("weight", master)
        master, m, v = adamw_reference(master, gradient, m, v, step, decay=number % 2 == 0)
        update_range(tile, gradient, 0, step, decay=number % 2 == 0)
        assert tile.remainder is not None
        joined = join_fp32(tile.weights[:numel], tile.remainder[:numel])
        assert torch.equal(bits(joined), bits(master))
        assert torch.equal(bits(tile.weights[:numel]), bits(nearest_bf16(master)))
        assert torch.equal(bits(tile.exp_avg[:numel]), bits(m))
    assert master.isfinite().all()


@pytest.mark.parametrize("fmt", ALL_FORMATS, ids=lambda fmt: f"{fmt.compute_dtype}-{fmt.master}")
@given(data=st.data())
def test_any_cuts_at_multiples_of_64_give_the_same_bits(
    fmt: TileFormat, data: st.DataObject
) -> None:
    torch.manual_seed(3)
    numel = 4000
    master, gradient = torch.randn(numel), torch.randn(numel).to(make_tile(1, fmt).weights.dtype)
    whole, pieces = make_tile(numel, fmt), make_tile(numel, fmt)
    for tile in (whole, pieces):
        torch.manual_seed(4)
        fill_tile(tile, master, step=6)
    update_range(whole, gradient, 0, a_step(7), decay=True)
    cuts = data.draw(st.sets(st.integers(1, numel // 64)))
    borders = [0, *sorted(cut * 64 for cut in cuts), numel]
    for start, end in data.draw(st.permutations(list(pairwise(borders)))):
        update_range(pieces, gradient[start:end], start, a_step(7), decay=True)
    assert torch.equal(bits(whole.weights), bits(pieces.weights))
    assert torch.equal(bits(whole.exp_avg), bits(pieces.exp_avg))
    assert torch.equal(bits(whole.exp_avg_sq), bits(pieces.exp_avg_sq))
    if whole.remainder is not None:
        assert pieces.remainder is not None
        assert torch.equal(whole.remainder, pieces.remainder)


@pytest.mark.parametrize("fmt", ALL_FORMATS, ids=lambda fmt: f"{fmt.compute_dtype}-{fmt.master}")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_gradient_that_is_not_finite_never_leaves_a_finite_weight(
    fmt: TileFormat, value: float
) -> None:
    tile = make_tile(130, fmt)
    fill_tile(tile, torch.ones(130))
    gradient = torch.zeros(130, dtype=tile.weights.dtype)
    gradient[[0, 129]] = value
    update_range(tile, gradient, 0, a_step(), decay=True)
    assert tile.weights[:130].isnan().nonzero().flatten().tolist() == [0, 129]
    assert tile.read_master("weight").isnan().nonzero().flatten().tolist() == [0, 129]


@pytest.mark.parametrize("fmt", ALL_FORMATS, ids=lambda fmt: f"{fmt.compute_dtype}-{fmt.master}")
@pytest.mark.parametrize("pattern", [0x7FFFFFFF, -1, 0x7F800001])
def test_no_payload_of_a_nan_makes_a_weight_finite(fmt: TileFormat, pattern: int) -> None:
    tile = make_tile(70, fmt)
    fill_tile(tile, torch.ones(70))
    tile.exp_avg.view(torch.int32)[:70] = pattern
    update_range(tile, torch.zeros(70, dtype=tile.weights.dtype), 0, a_step(), decay=True)
    assert tile.weights[:70].isnan().all()
    assert tile.read_master("weight").isnan().all()


def test_moments_of_an_unused_row_end_at_zero_and_not_among_the_slow_subnormals() -> None:
    tile = make_tile(100, SPLIT)
    fill_tile(tile, torch.ones(100))
    tile.exp_avg[:100] = -1e-29
    tile.exp_avg_sq[:100] = 1e-37
    subnormal_master = torch.full((100,), 1e-40)
    tile.write_master("weight", subnormal_master)
    for number in range(1, 101):
        step = a_step(number, weight_decay=0.0, eps=1e-8)
        update_range(tile, torch.zeros(100, dtype=torch.bfloat16), 0, step, decay=True)
        for moment in (tile.exp_avg[:100], tile.exp_avg_sq[:100]):
            assert ((moment == 0) | (moment.abs() >= 2.0**-126)).all()
    assert not tile.exp_avg.any()
    assert not tile.exp_avg_sq.any()
    # The change of 1e-2 * 1e-29 / 1e-8 and less is far above a subnormal master, which is exact.
    assert (tile.read_master("weight") > subnormal_master).all()


def test_small_steps_move_a_split_master_and_leave_a_bf16_one_where_it_is() -> None:
    moved = {}
    for fmt in (SPLIT, BF16):
        tile = make_tile(100, fmt)
        fill_tile(tile, torch.ones(100))
        for number in range(1, 201):
            gradient = torch.ones(100, dtype=torch.bfloat16)
            update_range(tile, gradient, 0, a_step(number, lr=1e-6, weight_decay=0.0), decay=True)
        moved[fmt.master] = 1.0 - tile.read_master("weight")[0].item()
    assert moved["fp32_split"] == pytest.approx(200e-6, rel=0.05)
    assert moved["bf16"] == 0.0


def test_random_rounding_is_unbiased_and_takes_one_of_the_two_neighbours() -> None:
    numel = 1 << 16
    tile = make_tile(numel, STOCHASTIC)
    fill_tile(tile, torch.ones(numel))
    step = a_step(lr=1e-3, weight_decay=1.0, eps=1.0)
    update_range(tile, torch.zeros(numel, dtype=torch.bfloat16), 0, step, decay=True)
    weights = tile.weights[:numel].float()
    # 0.999 lies between 0.99609375 and 1.0; p = 0.744 that it goes up.
    assert weights.unique().tolist() == [0.99609375, 1.0]
    sigma = (0.744 * 0.256 / numel) ** 0.5 * 0.00390625
    assert abs(weights.double().mean().item() - 0.999) < 5 * sigma


def test_random_rounding_repeats_for_the_same_key_and_differs_for_any_other() -> None:
    def rounded(step: AdamStep, layer_index: int) -> torch.Tensor:
        return stochastic_bf16(torch.full((4096,), 1.001), step.rounding_key(layer_index))

    base = rounded(AdamStep(3, 0, 0.9, 0.9, 0, 0, seed=1), 2)
    assert torch.equal(base, rounded(AdamStep(3, 0, 0.9, 0.9, 0, 0, seed=1), 2))
    others = [
        rounded(AdamStep(4, 0, 0.9, 0.9, 0, 0, seed=1), 2),
        rounded(AdamStep(3, 0, 0.9, 0.9, 0, 0, seed=2), 2),
        rounded(AdamStep(3, 0, 0.9, 0.9, 0, 0, seed=1), 3),
        rounded(AdamStep(1, 0, 0.9, 0.9, 0, 0, seed=3), 2),
    ]
    # Independent: two rounded tensors agree at p*p + q*q of their elements.
    up = (1.001 - 1.0) / 0.0078125
    expected = up**2 + (1 - up) ** 2
    for other in others:
        assert (base == other).float().mean().item() == pytest.approx(expected, abs=0.04)


@pytest.mark.parametrize("first", [(1 << 32) - 100, (1 << 32) - 512, (1 << 33) + 7])
def test_random_rounding_knows_elements_beyond_32_bits(first: int) -> None:
    numel = 1500
    weights = torch.full((numel,), 1.0).bfloat16()
    # Each element's change is a third of a BF16 step, so its random bits decide.
    step = AdamStep(step=1, lr=1.0, beta1=0.0, beta2=0.0, eps=1.0, weight_decay=0.0)
    gradient = torch.full((numel,), -0.0026).bfloat16()
    m, v = torch.zeros(numel), torch.zeros(numel)
    key = step.rounding_key(4)
    kernels.adamw_stochastic(
        (np.array([[0, numel, 0]]), np.zeros(1, np.int64), first),
        weights.view(torch.uint16).numpy(),
        gradient.view(torch.uint16).numpy(),
        m.numpy(),
        v.numpy(),
        step.scalars,
        np.uint64(key),
    )
    zeros = torch.zeros(numel)
    master, _, _ = adamw_reference(torch.ones(numel), gradient, zeros, zeros, step, decay=False)
    assert torch.equal(weights, stochastic_bf16(master, key, first))
    assert len(weights.unique()) == 2


def test_bias_corrections_come_from_the_integer_step() -> None:
    step = AdamStep(step=3, lr=1e-3, beta1=0.9, beta2=0.999, eps=0, weight_decay=0)
    assert step.step_size == 1e-3 / (1 - 0.9**3)
    assert step.sqrt_correction2 == (1 - 0.999**3) ** 0.5


def test_steps_are_counted_from_one() -> None:
    with pytest.raises(InternalError, match="from 1, not 0"):
        a_step(0)


def test_a_gradient_of_the_wrong_dtype_length_or_shape_is_a_bug() -> None:
    tile = make_tile(100, SPLIT)
    with pytest.raises(InternalError, match=r"100 gradients of torch\.float32"):
        update_range(tile, torch.zeros(100), 0, a_step(), decay=True)
    with pytest.raises(InternalError, match="200 gradients"):
        update_range(tile, torch.zeros(200, dtype=torch.bfloat16), 0, a_step(), decay=True)
    with pytest.raises(InternalError, match=r"strides \(2,\) is not flat"):
        update_range(tile, torch.zeros(64, dtype=torch.bfloat16)[::2], 0, a_step(), decay=True)
