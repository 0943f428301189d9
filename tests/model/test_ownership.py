"""Models that are not one sequence of layers with weights of their own are refused by name."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from megatrain_cli.errors import ModelError
from megatrain_cli.model.construct import construct
from megatrain_cli.model.ownership import Ownership, find_layers, find_owners, replace_layers
from megatrain_cli.model.recorder import LayerArgs, Recorder, Tape, split_hidden
from tests.families import tiny_config


def owners_of(change: Callable[[PreTrainedModel], None]) -> Ownership:
    """Ownership in a tiny Llama on meta that was changed."""
    model = construct(tiny_config("llama", tied=False), torch.float32, "sdpa")
    change(model)
    names = dict(model.named_parameters(remove_duplicate=False))
    _, layers = find_layers(model)
    tape = Tape(len(layers))
    return find_owners(model, names, replace_layers(layers, tape), tape)


def meta_weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, device="meta"))


def test_a_parameter_belongs_to_the_side_of_the_layers_where_it_is_used() -> None:
    owners = owners_of(lambda model: None)
    assert owners.embed == ("model.embed_tokens.weight",)
    assert owners.head == ("model.norm.weight", "lm_head.weight")
    assert owners.tied == ()
    assert [len(names) for names in owners.layers] == [9, 9, 9, 9]


def test_layers_that_share_a_parameter_are_refused() -> None:
    def share(model: PreTrainedModel) -> None:
        path = "model.layers.{}.mlp.up_proj"
        first, second = (model.get_submodule(path.format(i)) for i in (1, 2))
        second.weight = first.weight

    with pytest.raises(ModelError, match=r"layers 1 and 2 share .*1\.mlp\.up_proj\.weight"):
        owners_of(share)


def test_a_parameter_used_inside_and_outside_of_a_layer_is_refused() -> None:
    def share(model: PreTrainedModel) -> None:
        layer_norm = model.get_submodule("model.layers.3.input_layernorm")
        model.get_submodule("model.norm").weight = layer_norm.weight

    with pytest.raises(ModelError, match="used by decoder layer 3 and outside"):
        owners_of(share)


def test_a_parameter_that_nobody_uses_is_refused() -> None:
    def add(model: PreTrainedModel) -> None:
        model.base_model.register_parameter("spare", meta_weight(3))

    with pytest.raises(ModelError, match=r"uses `model\.spare` \(1 such"):
        owners_of(add)


def test_a_model_whose_layers_are_not_found_is_refused() -> None:
    def miscount(model: PreTrainedModel) -> None:
        model.config.num_hidden_layers = 3

    with pytest.raises(ModelError, match="0 lists of 3 modules"):
        owners_of(miscount)

    def double(model: PreTrainedModel) -> None:
        model.base_model.others = nn.ModuleList(nn.Identity() for _ in range(4))

    with pytest.raises(ModelError, match="2 lists of 4 modules"):
        owners_of(double)


class Layer(nn.Module):
    """Returns a tuple, and has an attribute that models ask for."""

    attention_type = "full_attention"

    def forward(self, hidden: torch.Tensor, *, scale: float) -> tuple[torch.Tensor, None, None]:
        return hidden * scale, None, None


def test_a_recorder_answers_and_returns_like_its_layer() -> None:
    tape = Tape(1)
    recorder = Recorder(Layer(), 0, tape)
    assert recorder.attention_type == "full_attention"
    assert not hasattr(recorder, "absent")
    assert not list(recorder.children())
    hidden = torch.ones(2)
    tape.learns = True
    recorder(hidden, scale=2.0)
    assert tape.calls == [LayerArgs((), {"scale": 2.0})]
    tape.clear()
    returned = recorder(hidden, scale=2.0)
    assert returned == (hidden, None, None)
    assert returned[0] is hidden


def test_layers_out_of_order_or_twice_are_refused() -> None:
    tape = Tape(2)
    hidden = torch.ones(2)
    tape.record(0, hidden, LayerArgs((), {}))
    with pytest.raises(ModelError, match="Decoder layer 0 is call number 1"):
        tape.record(0, hidden, LayerArgs((), {}))


def test_a_hidden_state_changed_between_layers_is_refused() -> None:
    tape = Tape(2)
    hidden = torch.ones(2)
    tape.record(0, hidden, LayerArgs((), {}))
    with pytest.raises(ModelError, match="changed between decoder layers 0 and 1"):
        tape.record(1, hidden * 2, LayerArgs((), {}))


def test_the_hidden_state_may_be_passed_by_name() -> None:
    hidden = torch.ones(2)
    assert split_hidden((), {"hidden_states": hidden, "a": 1}) == (hidden, LayerArgs((), {"a": 1}))
    with pytest.raises(ModelError, match="without a hidden state"):
        split_hidden((), {"a": 1})
