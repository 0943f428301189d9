"""The collector writes exactly the sum of a layer's gradients, once rounded, and nothing else."""

from collections.abc import Sequence

import pytest
import torch

from megatrain_cli.model.layout import LayerLayout, make_layout
from megatrain_cli.model.spec import LayerSpec, ParamSpec
from megatrain_cli.pipeline.gradients import GradientCollector, squared_norm, views

CPU = torch.device("cpu")


def layout_of(name: str, *shapes: tuple[int, ...]) -> LayerLayout:
    params = tuple(ParamSpec(f"{name}.{i}", shape) for i, shape in enumerate(shapes))
    return make_layout(LayerSpec(name, name, params))


LAYOUTS = (
    layout_of("embed", (7, 5)),
    layout_of("body", (3, 5), (9,), (5, 3)),
    layout_of("head", (5,)),
)


def gradients(layout: LayerLayout, seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [entry.param.shape for entry in layout.entries]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def collect(
    batches: Sequence[Sequence[torch.Tensor | None]], dtype: torch.dtype, layer: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    collector = GradientCollector(LAYOUTS, (), len(batches), CPU)
    out = torch.full((LAYOUTS[layer].numel,), torch.nan, dtype=dtype)
    for i, batch in enumerate(batches):
        collector.add(layer, batch, first=i == 0)
    norm = collector.finish(layer, batches[-1], out)
    return out, norm


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_run_is_the_fp32_sum_rounded_once(dtype: torch.dtype, count: int) -> None:
    batches = [gradients(LAYOUTS[1], seed, dtype) for seed in range(count)]
    out, norm = collect(batches, dtype)
    for i, view in enumerate(views(out, LAYOUTS[1])):
        total = torch.zeros_like(view, dtype=torch.float32)
        for batch in batches:
            total += batch[i]
        assert torch.equal(view, total.to(dtype))
    assert norm.item() == pytest.approx(out.double().square().sum().item(), rel=3e-7)


def test_alignment_gaps_are_zero_whatever_the_buffer_held() -> None:
    out, _ = collect([gradients(LAYOUTS[1], 0, torch.float32)], torch.float32)
    assert LAYOUTS[1].gaps
    assert all(out[start:end].eq(0).all() for start, end in LAYOUTS[1].gaps)


@pytest.mark.parametrize("count", [1, 3])
def test_a_parameter_without_a_gradient_leaves_its_neighbours_alone(count: int) -> None:
    batches: list[list[torch.Tensor | None]] = []
    for seed in range(count):
        first, _, last = gradients(LAYOUTS[1], seed, torch.float32)
        batches.append([first, None, last])
    out, _ = collect(batches, torch.float32)
    whole, _ = collect(
        [gradients(LAYOUTS[1], s, torch.float32) for s in range(count)], torch.float32
    )
    got, wanted = views(out, LAYOUTS[1]), views(whole, LAYOUTS[1])
    assert torch.equal(got[0], wanted[0])
    assert got[1].eq(0).all()
    assert torch.equal(got[2], wanted[2])


def test_many_micro_batches_do_not_round_away_in_bf16() -> None:
    """64 equal rows: summed in BF16 the total would be off by percents, rounded once it is not."""
    batch = [torch.full(e.param.shape, 1e-3, dtype=torch.bfloat16) for e in LAYOUTS[1].entries]
    out, _ = collect([batch] * 64, torch.bfloat16)
    assert views(out, LAYOUTS[1])[0].float().sub(0.064).abs().max() < 0.064 * 2**-8


@pytest.mark.parametrize("count", [1, 2])
def test_both_parts_of_a_tied_gradient_are_summed_before_rounding(count: int) -> None:
    collector = GradientCollector(LAYOUTS, (0,), count, CPU)
    collector.start_head()
    from_head = torch.randn(7, 5)
    collector.tied_sums[0].add_(from_head)
    out = torch.zeros(LAYOUTS[0].numel, dtype=torch.bfloat16)
    batches = [gradients(LAYOUTS[0], seed, torch.bfloat16) for seed in range(count)]
    for i, batch in enumerate(batches):
        collector.add(0, batch, first=i == 0)
    collector.finish(0, batches[-1], out)
    total = sum((batch[0].float() for batch in batches), torch.zeros(7, 5))
    assert torch.equal(views(out, LAYOUTS[0])[0], (from_head + total).bfloat16())


@pytest.mark.parametrize("numel", [1, 1023, 1024, 5000])
def test_the_squared_norm_is_right_for_any_length(numel: int) -> None:
    flat = torch.randn(numel)
    assert squared_norm(flat).item() == pytest.approx(flat.double().square().sum().item(), rel=3e-7)
    assert squared_norm(torch.tensor([1.0, torch.inf])).isinf()
    assert squared_norm(torch.tensor([1.0, torch.nan])).isnan()
