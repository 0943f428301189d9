"""Published models by name: each has the parameters that its card states; others are refused.

Mixtures of experts are in `test_known_mixtures.py`.
"""

import pytest
import torch

from megatrain_cli.errors import ModelError
from megatrain_cli.model.known import known_skeleton
from megatrain_cli.model.shapes import find_shape, known_shapes

NAMES = tuple(name for name, shape in known_shapes().items() if shape.active is None)


@pytest.mark.parametrize("name", NAMES)
def test_a_known_model_has_the_published_number_of_parameters(name: str) -> None:
    """Layers of one model are alike in number, so two stand for all."""
    shape = find_shape(name)
    attention = "sdpa" if shape.attention == "auto" else shape.attention
    spec = known_skeleton(name, dtype=torch.bfloat16, attention=attention, layers=2).spec
    first, second = spec.decoder_layers
    assert first.numel == second.numel
    parameters = spec.num_parameters + (shape.layers - 2) * first.numel
    assert parameters == shape.parameters
    assert spec.vocab_size == shape.vocab
    assert bool(spec.tied) is shape.tied
    assert spec.max_positions == shape.positions


def test_a_whole_model_has_all_its_layers() -> None:
    spec = known_skeleton("Qwen2.5-0.5B", dtype=torch.bfloat16, attention="sdpa").spec
    assert spec.num_parameters == find_shape("qwen2.5-0.5b").parameters
    assert len(spec.decoder_layers) == 24


def test_the_list_is_long() -> None:
    assert len(NAMES) >= 40


def test_an_unknown_name_is_refused_with_what_was_probably_meant() -> None:
    with pytest.raises(ModelError, match=r"no model `qwen2.5-33b`.*Did you mean .*qwen2.5-32b"):
        find_shape("qwen2.5-33b")
    with pytest.raises(ModelError, match=r"in the list\. Known are llama-2-7b"):
        find_shape("?")
