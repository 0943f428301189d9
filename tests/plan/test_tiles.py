"""A tile's bytes: whole pages per region, and never less for more."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.errors import InternalError
from megatrain_cli.model.layout import LayerLayout, make_layout
from megatrain_cli.model.spec import LayerSpec, ParamSpec
from megatrain_cli.plan.tiles import PAGE_BYTES, TileFormat, store_bytes, tile_regions

FORMATS = [
    TileFormat("bfloat16", "fp32_split", keep_gradient=True),
    TileFormat("bfloat16", "fp32_split", keep_gradient=False),
    TileFormat("bfloat16", "bf16", keep_gradient=True),
    TileFormat("bfloat16", "bf16_stochastic", keep_gradient=False),
    TileFormat("bfloat16", "fp32", keep_gradient=True),
    TileFormat("float32", "fp32", keep_gradient=True),
]
formats = st.sampled_from(FORMATS)


def layout_of(numel: int) -> LayerLayout:
    return make_layout(LayerSpec("layer", "layer", (ParamSpec("weight", (numel,)),)))


@pytest.mark.parametrize(
    ("fmt", "bytes_per_param"), list(zip(FORMATS, [14, 12, 12, 10, 16, 16], strict=True))
)
def test_bytes_per_parameter_are_those_of_the_design(fmt: TileFormat, bytes_per_param: int) -> None:
    numel = 64 * PAGE_BYTES
    assert sum(tile_regions(numel, fmt).values()) == bytes_per_param * numel


def test_weights_and_gradient_come_first_and_side_by_side() -> None:
    regions = tile_regions(1000, TileFormat("bfloat16", "fp32_split", keep_gradient=True))
    assert list(regions) == ["weights", "gradient", "remainder", "exp_avg", "exp_avg_sq"]


@given(st.integers(0, 1 << 40), formats)
def test_every_region_is_whole_pages_and_wastes_less_than_one(numel: int, fmt: TileFormat) -> None:
    for name, num_bytes in tile_regions(numel, fmt).items():
        width = 4 if fmt.compute_dtype == "float32" or name.startswith(("master", "exp")) else 2
        assert num_bytes % PAGE_BYTES == 0
        assert 0 <= num_bytes - numel * width < PAGE_BYTES


@given(st.lists(st.integers(1, 1 << 34), max_size=6), st.integers(1, 1 << 34), formats)
def test_more_layers_or_parameters_never_need_less(
    sizes: list[int], more: int, fmt: TileFormat
) -> None:
    small = sum(store_bytes(map(layout_of, sizes), fmt).values())
    assert sum(store_bytes(map(layout_of, [*sizes, more]), fmt).values()) > small
    assert sum(store_bytes((layout_of(size + more) for size in sizes), fmt).values()) >= small


@given(st.integers(0, 1 << 34))
def test_a_kept_gradient_costs_exactly_its_own_region(numel: int) -> None:
    kept = tile_regions(numel, TileFormat("bfloat16", "fp32_split", keep_gradient=True))
    gradient = kept.pop("gradient")
    assert gradient == kept["weights"]
    assert kept == tile_regions(numel, TileFormat("bfloat16", "fp32_split", keep_gradient=False))


def test_float32_weights_have_no_other_master() -> None:
    with pytest.raises(InternalError, match="their own master"):
        TileFormat("float32", "fp32_split", keep_gradient=True)
