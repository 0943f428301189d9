"""A skeleton knows every parameter and holds none; what cannot be trained is refused by name."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BloomConfig,
    Gemma2Config,
    LlamaForSequenceClassification,
    MixtralConfig,
    OPTConfig,
    PreTrainedConfig,
    T5Config,
)

from megatrain_cli.errors import ModelError
from megatrain_cli.model.discover import discover, make_skeleton
from megatrain_cli.model.skeleton import Skeleton
from tests.families import KINDS, make_tiny, tiny_config

SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim",
)  # fmt: skip
every_family = pytest.mark.parametrize("kind", KINDS)
every_tie = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])


def make(kind: str, *, tied: bool = True, **kw: Any) -> Skeleton:
    return make_skeleton(tiny_config(kind, tied=tied, **kw), dtype=torch.bfloat16, attention="sdpa")


def refuse(folder: Path, config: dict[str, Any] | str) -> str:
    """The error for a folder with this config.json."""
    text = config if isinstance(config, str) else json.dumps(config)
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError) as caught:
        discover(folder, dtype=torch.float32, attention="sdpa")
    message = str(caught.value)
    assert "\n" not in message
    return message


@every_family
@every_tie
def test_names_and_shapes_are_those_of_the_model(kind: str, tied: bool) -> None:
    spec = make(kind, tied=tied).spec
    model = make_tiny(kind, tied=tied)
    expected = {name: tuple(param.shape) for name, param in model.named_parameters()}
    found = {p.name: p.shape for layer in spec.layers for p in layer.params}
    assert found == expected
    assert spec.num_parameters == sum(param.numel() for param in model.parameters())
    assert [layer.name for layer in spec.layers] == [
        "embed",
        *(f"layer-{i:05d}" for i in range(4)),
        "head",
    ]
    for layer in spec.decoder_layers:
        assert all(p.name.startswith(f"{layer.prefix}.") for p in layer.params)


@every_family
def test_a_tied_head_is_owned_by_the_embedding(kind: str) -> None:
    skeleton = make(kind, tied=True)
    (tied,) = skeleton.spec.tied
    assert tied in {p.name for p in skeleton.spec.embed.params}
    assert skeleton.aliases == {"lm_head.weight": tied}
    untied = make(kind, tied=False)
    assert untied.spec.tied == ()
    assert untied.aliases == {}
    assert "lm_head.weight" in {p.name for p in untied.spec.head.params}


@every_family
def test_layouts_tile_the_parameters(kind: str) -> None:
    skeleton = make(kind)
    for layout, layer in zip(skeleton.layouts, skeleton.spec.layers, strict=True):
        assert [entry.param for entry in layout.entries] == list(layer.params)
        covered = sorted([*((e.offset, e.end) for e in layout.entries), *layout.gaps])
        assert [start for start, _ in covered] == [0, *(end for _, end in covered[:-1])]
        assert covered[-1][1] == layout.numel


@every_family
def test_parameters_are_meta_and_buffers_are_real(kind: str) -> None:
    skeleton = make(kind)
    reference = make_tiny(kind, tied=True)
    found = dict(skeleton.model.named_buffers())
    expected = dict(reference.named_buffers())
    assert found.keys() == expected.keys()
    for name, buffer in expected.items():
        assert torch.equal(found[name], buffer)
        assert found[name].dtype == buffer.dtype  # rotary frequencies stay FP32
    assert all(p.is_meta for p in skeleton.model.parameters())
    assert all(p.is_meta for layer in skeleton.layers for p in layer.parameters())


def test_buffers_move_together() -> None:
    skeleton = make("llama")
    skeleton.layers[2].register_buffer("extra", torch.ones(2))
    skeleton.move_buffers(torch.device("meta"))
    assert all(b.is_meta for b in skeleton.model.buffers())
    assert all(b.is_meta for layer in skeleton.layers for b in layer.buffers())


def test_neither_config_nor_random_state_is_changed() -> None:
    config = tiny_config("gpt2", tied=True, pad_token_id=3)
    before, random_state = config.to_dict(), torch.get_rng_state()
    skeleton = make_skeleton(config, dtype=torch.bfloat16, attention="eager")
    assert config.to_dict() == before
    assert skeleton.hf_config is config
    assert torch.equal(torch.get_rng_state(), random_state)


def test_old_gpt2_files_may_hold_attention_masks() -> None:
    assert "attn.bias" in make("gpt2").ignored_keys


@every_family
def test_dropout_is_seen(kind: str) -> None:
    assert not make(kind).spec.has_dropout
    assert not make(kind).layers[0].training
    names = ["attn_pdrop", "resid_pdrop", "embd_pdrop"] if kind == "gpt2" else ["attention_dropout"]
    for name in names:
        fields: dict[str, Any] = {name: 0.1}
        skeleton = make(kind, **fields)
        assert skeleton.spec.has_dropout
        assert all(layer.training for layer in skeleton.layers)


def test_layers_of_another_type_are_another_kind() -> None:
    types = ["full_attention", "sliding_attention"] * 2
    fields: dict[str, Any] = {
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
    }
    kinds = [x.kind for x in make("qwen2", layer_types=types, **fields).spec.decoder_layers]
    assert kinds[0] == kinds[2]
    assert kinds[1] == kinds[3]
    assert kinds[0] != kinds[1]
    assert len({x.kind for x in make("gpt2").spec.decoder_layers}) == 1
    scaled = make("gpt2", scale_attn_by_inverse_layer_idx=True).spec.decoder_layers
    assert len({x.kind for x in scaled}) == 4


# In a process of its own: the peak of this one would hide it.
GROWN = """
    import torch
    from transformers import Qwen2Config
    from megatrain_cli.model.discover import make_skeleton
    from megatrain_cli.probe.peaks import host_peak_bytes

    config = Qwen2Config(
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=152064,
    )
    before = host_peak_bytes()
    skeleton = make_skeleton(config, dtype=torch.bfloat16, attention="sdpa")
    print(skeleton.spec.num_parameters, host_peak_bytes() - before)
"""


@pytest.mark.slow
def test_a_model_of_7b_parameters_needs_no_room() -> None:
    script = [sys.executable, "-c", textwrap.dedent(GROWN)]
    run = subprocess.run(script, check=True, capture_output=True, text=True)
    num_parameters, grown = map(int, run.stdout.split())
    assert num_parameters == 7_615_616_512
    assert grown < 256 << 20


@pytest.mark.parametrize(
    "config",
    [
        MixtralConfig(architectures=["MixtralForCausalLM"]),
        Gemma2Config(architectures=["Gemma2ForCausalLM"]),
        OPTConfig(architectures=["OPTForCausalLM"]),
        BloomConfig(architectures=["BloomForCausalLM"]),
    ],
    ids=lambda config: config.model_type,
)
def test_an_architecture_that_was_not_proved_is_refused_by_name(
    config: PreTrainedConfig, tmp_path: Path
) -> None:
    message = refuse(tmp_path, config.to_dict())
    assert config.architectures is not None
    assert message.startswith(config.architectures[0])
    assert "not proved yet" in message


def test_what_is_no_causal_language_model_is_refused(tmp_path: Path) -> None:
    t5 = T5Config(architectures=["T5ForConditionalGeneration"])
    assert "T5ForConditionalGeneration is an encoder-decoder" in refuse(tmp_path, t5.to_dict())
    classifier = tiny_config(
        "llama", tied=False, architectures=[LlamaForSequenceClassification.__name__]
    )
    message = refuse(tmp_path, classifier.to_dict())
    assert "LlamaForSequenceClassification is not a causal LM" in message
    assert "no causal LM for model type `vit`" in refuse(tmp_path, {"model_type": "vit"})
    unknown = {"model_type": "unheard_of", "architectures": ["UnheardOfForCausalLM"]}
    assert "UnheardOfForCausalLM" in refuse(tmp_path, unknown)


def test_a_quantised_model_is_refused(tmp_path: Path) -> None:
    config = tiny_config("llama", tied=False).to_dict()
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    assert "LlamaForCausalLM is quantised" in refuse(tmp_path, config)


def test_cross_attention_is_refused(tmp_path: Path) -> None:
    config = tiny_config("gpt2", tied=True, add_cross_attention=True).to_dict()
    assert "GPT2LMHeadModel has an encoder or cross-attention" in refuse(tmp_path, config)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "no `model_type`"),
        ('{"vocab_size": 3}', "no `model_type`"),
        ('{"model_type": "llama", "vocab_size": "many"}', "not a valid llama config"),
        ('{"model_type": "llama", "rope_parameters": 3}', "not a valid llama config"),
    ],
)
def test_a_damaged_config_is_one_clear_line(text: str, reason: str, tmp_path: Path) -> None:
    message = refuse(tmp_path, text)
    assert reason in message
    assert str(tmp_path / "config.json") in message


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        *((name, 0, f"`{name}` is 0, not 1 or more") for name in SIZES),
        *((name, -16, f"`{name}` is -16, not 1 or more") for name in SIZES),
        *((name, 10**9, f"`{name}` is 1000000000, not ") for name in SIZES),
        ("num_hidden_layers", 10**6, "`num_hidden_layers` is 1000000, not 4096 at most"),
        ("num_attention_heads", 5, "not a valid llama config"),
        ("num_key_value_heads", 3, "LlamaForCausalLM cannot be followed without weights"),
        ("sliding_window", 0, "`sliding_window` is 0: a token would not even see itself"),
        ("sliding_window", -1, "`sliding_window` is -1"),
        ("attention_dropout", -1, "`attention_dropout` is -1, not from 0 to below 1"),
        ("attention_dropout", 1.0, "`attention_dropout` is 1.0, not from 0 to below 1"),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 0.0}, "are not finite"),
        ("rope_parameters", {"rope_type": "default", "rope_theta": -1.0}, "are not finite"),
        ("max_position_embeddings", 0, "rows have at most 0 tokens (`max_position_embeddings`)"),
        ("max_position_embeddings", -1, "rows have at most -1 tokens"),
        ("hidden_act", "unheard_of", "cannot make a llama model of this config: KeyError: 'unhear"),
        ("rope_parameters", {"rope_type": "unheard_of"}, "cannot make a llama model"),
        ("architectures", "LlamaForCausalLM", "'LlamaForCausalLM', not a list of names"),
        ("architectures", [3], r"[3], not a list of names"),
    ],
)
def test_a_value_that_no_model_can_be_made_of_is_one_clear_line(
    field: str, value: object, reason: str, tmp_path: Path
) -> None:
    config = tiny_config("llama", tied=False).to_dict() | {field: value}
    assert reason in refuse(tmp_path, config)


def test_names_of_sizes_are_those_of_the_family(tmp_path: Path) -> None:
    for name in ("n_embd", "n_head", "n_layer", "vocab_size"):
        config = tiny_config("gpt2", tied=True).to_dict() | {name: 0}
        assert f"{tmp_path / 'config.json'}: `{name}` is 0, not 1 or more" in refuse(
            tmp_path, config
        )


def test_parameters_without_elements_are_refused() -> None:
    with pytest.raises(ModelError, match="has a size of 0: 12 of 38 parameters are empty"):
        make("llama", intermediate_size=0)


def test_an_embedding_beyond_all_addresses_is_one_clear_line(tmp_path: Path) -> None:
    config = tiny_config("gpt2", tied=True).to_dict() | {"n_positions": 10**14}
    assert "cannot even address an embedding of" in refuse(tmp_path, config)


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_of_nothing_is_refused_where_it_is_in_force(tmp_path: Path, window: int) -> None:
    for kind in ("mistral", "qwen2", "qwen3"):
        config = tiny_config(kind, tied=False).to_dict() | {"sliding_window": window}
        config |= {} if kind == "mistral" else {"use_sliding_window": True}
        assert f"`sliding_window` is {window}" in refuse(tmp_path, config)
    unused = tiny_config("qwen3", tied=False).to_dict() | {"sliding_window": window}
    (tmp_path / "config.json").write_text(json.dumps(unused))
    off = discover(tmp_path, dtype=torch.float32, attention="sdpa")
    assert off.spec.window is None


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_tables_that_change_with_the_batch_are_refused_by_name(
    kind: str, tmp_path: Path
) -> None:
    rope: dict[str, object] = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    if kind == "longrope":
        factors = [1.0] * 4
        rope |= {"short_factor": factors, "long_factor": factors}
        rope |= {"original_max_position_embeddings": 32}
    config = tiny_config("llama", tied=False, rope_parameters=rope).to_dict()
    assert f"rope type `{kind}`, whose tables change" in refuse(tmp_path, config)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "it is no model as Hugging Face serves it"),
        ("checkpoints/latest.json", "it is a run. Name one of its checkpoints"),
        ("adapter_config.json", "it holds an adapter. Merge that"),
    ],
)
def test_a_folder_without_a_config_is_told_by_what_it_is(
    tmp_path: Path, content: str | None, reason: str
) -> None:
    if content is not None:
        (tmp_path / content).parent.mkdir(exist_ok=True)
        (tmp_path / content).write_text("{}")
    with pytest.raises(ModelError) as caught:
        discover(tmp_path, dtype=torch.float32, attention="sdpa")
    assert str(caught.value).startswith(f"{tmp_path} has no config.json: {reason}")
