"""Mixtures of experts: what a token meets is what its gradient reaches; dtypes of their own."""

from typing import Any, cast

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from megatrain_cli.errors import ModelError
from megatrain_cli.model.discover import make_skeleton
from megatrain_cli.model.skeleton import Skeleton

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 128}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4, "num_experts_per_tok": 3}
ROUTED = {"n_routed_experts": 8, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
ROUTED |= {"n_group": 1, "topk_group": 1}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
LATENT |= {"v_head_dim": 12}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8},
    "qwen2_moe": {
        "num_experts": 8,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
    },
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 16, "head_dim": 8},
    "gpt_oss": {"num_local_experts": 8, "head_dim": 8},
    "deepseek_v2": ROUTED | LATENT,
    "deepseek_v3": ROUTED | LATENT,
    "glm4_moe": ROUTED | {"head_dim": 8},
    "olmoe": {"num_experts": 8},
}


def kept_dtypes(config: PreTrainedConfig) -> dict[str, torch.dtype]:
    """What Hugging Face's own BF16 model keeps in another dtype: older versions nothing."""
    model = cast("Any", AutoModelForCausalLM).from_config(config, dtype=torch.bfloat16)
    return {name: p.dtype for name, p in model.named_parameters() if p.dtype != torch.bfloat16}


def config_of(family: str, **kw: Any) -> PreTrainedConfig:
    config: PreTrainedConfig = AutoConfig.for_model(family, **SIZES | FAMILIES[family] | kw)
    return config


def skeleton_of(config: PreTrainedConfig, dtype: torch.dtype = torch.bfloat16) -> Skeleton:
    attention = "eager" if config.model_type == "gpt_oss" else "sdpa"
    return make_skeleton(config, dtype=dtype, attention=attention, to_train=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_meets_the_experts_that_its_gradient_reaches(family: str) -> None:
    """Against the gradients of one token in Hugging Face's own model."""
    config = config_of(family)
    spec = skeleton_of(config).spec
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.float()(input_ids=torch.tensor([[5]])).logits.square().sum().backward()
    params = [param for layer in spec.decoder_layers for param in layer.params]
    stacks = [param for param in params if param.visited]
    assert len(stacks) >= 2
    for param in stacks:
        gradient = model.get_parameter(param.name).grad
        reached = gradient.flatten(1).abs().amax(1).count_nonzero()
        assert int(reached) == param.visited == config.num_experts_per_tok
        assert param.active_numel == param.numel * 3 // 8
    assert not any("router" in p.name or "gate.weight" in p.name for p in stacks)
    active = sum(p.active_numel for p in params) + spec.embed.numel + spec.head.numel
    assert spec.num_active == active < spec.num_parameters


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_the_same_in_any_dtype(family: str) -> None:
    half, full = (
        skeleton_of(config_of(family), dtype) for dtype in (torch.bfloat16, torch.float32)
    )
    assert half.spec == full.spec
    assert not full.foreign
    assert full.model.config._experts_implementation == "grouped_mm"


def test_all_of_a_dense_model_is_active() -> None:
    config = AutoConfig.for_model("llama", **SIZES)
    spec = skeleton_of(config).spec
    assert spec.num_active == spec.num_parameters


@pytest.mark.parametrize("family", FAMILIES)
def test_a_dtype_of_its_own_is_planned_and_not_trained(family: str) -> None:
    skeleton = skeleton_of(config_of(family))
    assert skeleton.foreign == kept_dtypes(config_of(family))
    if skeleton.foreign:
        message = "keeps `model.layers.1.mlp.gate.weight` in torch.float32, not in torch.bfloat16"
        with pytest.raises(ModelError, match=message):
            make_skeleton(skeleton.hf_config, dtype=torch.bfloat16, attention="sdpa")


def test_buffers_of_layers_keep_their_values() -> None:
    skeleton = skeleton_of(config_of("deepseek_v3"))
    buffers = dict(skeleton.layers[2].named_buffers())
    assert buffers
    assert not any(buffer.is_meta for buffer in buffers.values())


def test_the_largest_layer_need_not_be_the_first() -> None:
    first, second, third = skeleton_of(config_of("glm4_moe")).spec.decoder_layers
    assert first.kind != second.kind == third.kind
    assert first.numel == first.active_numel < second.numel == third.numel


def test_only_layers_with_a_window_are_short_sighted() -> None:
    spec = skeleton_of(config_of("gpt_oss", sliding_window=16)).spec
    assert spec.window == 16
    assert [layer.sees_all for layer in spec.decoder_layers] == [False, True, False]


def test_latent_attention_is_as_wide_as_its_keys_and_values() -> None:
    """Scores are made of keys of 16, sums of values of 12, in 4 heads."""
    assert skeleton_of(config_of("deepseek_v3")).spec.attention_width == 4 * (16 + 12) // 2


def test_attention_that_a_family_lacks_is_refused_with_what_it_has() -> None:
    message = r"gpt_oss models have no `sdpa` attention.* Set `model.attention: eager`"
    with pytest.raises(ModelError, match=message):
        make_skeleton(config_of("gpt_oss"), dtype=torch.bfloat16, attention="sdpa")
