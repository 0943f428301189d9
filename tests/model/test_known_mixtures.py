"""Published mixtures by name: parameters in all, and those a token meets, as on their cards."""

import pytest
import torch

from megatrain_cli.model.known import known_skeleton
from megatrain_cli.model.shapes import find_shape, known_shapes

NAMES = tuple(name for name, shape in known_shapes().items() if shape.active is not None)

# What a card leaves out of what a token meets: the embedding, or the head as well.
WITHOUT_EMBEDDING = ("gpt-oss", "deepseek-v2-lite", "deepseek-v3", "deepseek-r1", "kimi-k2")
WITHOUT_BOTH = ("glm-4.5",)


@pytest.mark.parametrize("name", NAMES)
def test_a_known_mixture_has_the_published_numbers_of_parameters(name: str) -> None:
    """Layers behind the first dense ones are alike in number, so two stand for all."""
    shape = find_shape(name)
    dense = shape.more.get("first_k_dense_replace", 0)
    assert isinstance(dense, int)
    attention = "sdpa" if shape.attention == "auto" else shape.attention
    spec = known_skeleton(name, dtype=torch.bfloat16, attention=attention, layers=dense + 2).spec
    *first, one, other = spec.decoder_layers
    assert all(layer.numel < one.numel == other.numel for layer in first)
    more = shape.layers - dense - 2
    assert spec.num_parameters + more * one.numel == shape.parameters
    assert spec.vocab_size == shape.vocab
    assert spec.max_positions == shape.positions

    active = spec.num_active + more * one.active_numel
    if name.startswith((*WITHOUT_EMBEDDING, *WITHOUT_BOTH)):
        active -= spec.embed.numel
    if name.startswith(WITHOUT_BOTH):
        active -= spec.head.numel
    # Cards round to two digits, and not all to the nearest; OpenAI's to three.
    rounding = 1e-3 if name.startswith("gpt-oss") else 0.025
    assert active == pytest.approx(shape.active, rel=rounding)


def test_the_list_has_the_families() -> None:
    assert {find_shape(name).type for name in NAMES} >= {
        *("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3"),
        "glm4_moe",
    }
    assert len(NAMES) >= 11


def test_what_a_card_counts_with_the_layers_left_out() -> None:
    """GLM-4.5's files hold one more layer: it joins two hidden states and has its own ends."""
    for name, in_files in (("glm-4.5", 358337791296), ("glm-4.5-air", 110468824832)):
        shape = find_shape(name)
        spec = known_skeleton(name, dtype=torch.bfloat16, attention="sdpa", layers=5).spec
        ends = spec.embed.numel + spec.head.numel - shape.hidden
        joins = 2 * shape.hidden**2 + 3 * shape.hidden
        dense, experts = shape.more["first_k_dense_replace"], shape.more["n_routed_experts"]
        assert isinstance(dense, int)
        assert isinstance(experts, int)
        biases = (shape.layers - dense + 1) * experts
        extra = spec.decoder_layers[-1].numel + ends + joins + biases
        assert shape.parameters + extra == in_files
