"""Tiny models of every proved family, for tests of all parts."""

from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

KINDS = ("llama", "qwen2", "qwen3", "mistral", "gpt2")
VOCAB = 260  # bytes and four special tokens
WINDOW = 8  # of tiny Mistral

_MODELS: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "gpt2": (GPT2Config, GPT2LMHeadModel),
}


def tiny_config(
    kind: str, *, tied: bool, layers: int = 4, hidden: int = 32, **kw: Any
) -> PreTrainedConfig:
    """Config of a tiny model: vocabulary 260, 4 heads, 2 key/value heads, no dropout."""
    config_class, model_class = _MODELS[kind]
    fields: dict[str, Any] = {
        "vocab_size": VOCAB,
        "tie_word_embeddings": tied,
        "architectures": [model_class.__name__],
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": None,
        "max_position_embeddings": 64,
        # Large enough that attention is far from uniform, or a wrong mask would hardly show.
        "initializer_range": 0.1,
    }
    if kind == "gpt2":
        del fields["max_position_embeddings"]
        fields |= {"n_layer": layers, "n_embd": hidden, "n_head": 4, "n_positions": 64}
        fields |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    else:
        fields |= {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": 4}
        fields |= {"num_key_value_heads": 2, "intermediate_size": 2 * hidden + 16}
    if kind == "qwen3":
        fields["head_dim"] = 12  # not hidden / heads, as in the real ones
    if kind == "mistral":
        fields["sliding_window"] = WINDOW
    return config_class(**(fields | kw))


def make_tiny(
    kind: str, *, tied: bool, seed: int = 0, layers: int = 4, hidden: int = 32, **kw: Any
) -> PreTrainedModel:
    """A tiny model in FP32 with random weights, in eval mode.

    Norms and biases are random too, so that a parameter that was loaded differs from one that was
    left at its start. The global random state is left as it was.
    """
    config = tiny_config(kind, tied=tied, layers=layers, hidden=hidden, **kw)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _MODELS[kind][1](config)
        with torch.no_grad():
            for param in model.parameters():
                if param.dim() == 1:
                    param.add_(torch.randn_like(param) * 0.2)
    model.eval()
    return model
