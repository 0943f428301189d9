"""Random weights are drawn as Hugging Face draws them, and depend on seed and layer alone."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatrain_cli.model.discover import make_skeleton
from megatrain_cli.model.initial import RandomLayers
from megatrain_cli.model.skeleton import Skeleton
from tests.families import KINDS, tiny_config


def make(kind: str, *, tied: bool = True, dtype: torch.dtype = torch.bfloat16) -> Skeleton:
    config = tiny_config(kind, tied=tied, hidden=96, pad_token_id=3, initializer_range=0.02)
    return make_skeleton(config, dtype=dtype, attention="sdpa")


def draw(skeleton: Skeleton, seed: int, name: str) -> dict[str, Tensor]:
    layer = next(x for x in skeleton.spec.layers if x.name == name)
    return dict(RandomLayers(skeleton, seed).read(layer))


def draw_all(skeleton: Skeleton, seed: int) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for layer in skeleton.spec.layers:
        found |= draw(skeleton, seed, layer.name)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_statistics_are_those_of_hugging_face(kind: str, tied: bool) -> None:
    skeleton = make(kind, tied=tied)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        reference = AutoModelForCausalLM.from_config(skeleton.hf_config, dtype=torch.float32)
    expected = dict(reference.named_parameters())
    found = draw_all(skeleton, 0)
    assert list(found) == [p.name for layer in skeleton.spec.layers for p in layer.params]
    assert found.keys() == expected.keys()
    for name, param in expected.items():
        drawn = found[name]
        assert drawn.dtype == torch.float32
        assert drawn.shape == param.shape
        if param.std() == 0:
            assert torch.equal(drawn, param.detach()), name
        else:
            # Five standard errors of a standard deviation, and of a mean.
            std = float(param.detach().std())
            assert abs(float(drawn.std()) / std - 1) < 5 / (2 * drawn.numel()) ** 0.5 + 0.03, name
            assert abs(float(drawn.mean())) < 5 * std / drawn.numel() ** 0.5, name
        padding_row = drawn[3].abs().max() if drawn.dim() == 2 else None
        if padding_row is not None and not param.detach()[3].any():
            assert padding_row == 0, name


def test_the_row_of_the_padding_token_is_zero_also_when_tied() -> None:
    found = draw(make("llama"), 0, "embed")["model.embed_tokens.weight"]
    assert not found[3].any()
    assert found[4].any()


@pytest.mark.parametrize("kind", KINDS)
def test_values_depend_on_seed_and_layer_alone(kind: str) -> None:
    skeleton = make(kind)
    expected = draw_all(skeleton, 7)
    names = [layer.name for layer in skeleton.spec.layers]
    random_state = torch.get_rng_state()
    with ThreadPoolExecutor(4) as pool:
        parts = pool.map(lambda name: draw(skeleton, 7, name), reversed(names))
        found = {name: value for part in parts for name, value in part.items()}
    assert torch.equal(random_state, torch.get_rng_state())
    other_dtype = draw_all(make(kind, dtype=torch.float32), 7)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
        assert torch.equal(other_dtype[name], value), name


@pytest.mark.parametrize("kind", KINDS)
def test_layers_and_seeds_differ(kind: str) -> None:
    skeleton = make(kind)
    first, second = (
        draw(skeleton, 0, "layer-00000"),
        draw(skeleton, 0, "layer-00001"),
    )
    other = draw(skeleton, 1, "layer-00000")
    prefixes = [layer.prefix for layer in skeleton.spec.decoder_layers]
    for name, value in first.items():
        if value.dim() > 1:
            assert not torch.equal(value, other[name]), name
            twin = name.replace(prefixes[0], prefixes[1])
            assert not torch.equal(value, second[twin]), name


def test_the_skeleton_stays_without_weights() -> None:
    skeleton = make("gpt2")
    draw_all(skeleton, 0)
    assert all(p.is_meta for layer in skeleton.layers for p in layer.parameters())
    assert all(p.is_meta for p in skeleton.model.parameters())
