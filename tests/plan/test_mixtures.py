"""Mixtures of experts: all parameters are kept and moved, those that a token meets are computed."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from megatrain_cli.model.discover import make_skeleton
from megatrain_cli.model.skeleton import Skeleton
from megatrain_cli.model.spec import LayerSpec, ModelSpec, ParamSpec
from megatrain_cli.model.template import LayerTemplate, Prologue
from megatrain_cli.plan.cost import step_bounds
from megatrain_cli.plan.estimates import Sizes, graph_bytes
from megatrain_cli.plan.flops import layer_flops
from megatrain_cli.plan.machine import MachineSpec
from tests.plan.small import GPU, RATES, make_spec, plan_for, specs

MEASURED = replace(GPU, rates=RATES)
RECOMPUTE = {"pipeline": {"activations": "recompute"}}
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 64}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
TOKENS = 256
ONE_EXPERT = {"num_local_experts": 1, "num_experts_per_tok": 1}
LATENT = {"q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16}
LATENT |= {"num_key_value_heads": 4, "first_k_dense_replace": 2}
ROUTED = {"num_experts_per_tok": 4, "moe_intermediate_size": 96, "head_dim": 32}


def mixture(spec: ModelSpec, experts: int, visited: int, *, routed: bool = True) -> ModelSpec:
    """A model with a stack of experts in the place of each matrix, and a router beside it."""

    def widened(layer: LayerSpec) -> LayerSpec:
        params = tuple(
            replace(p, shape=(experts, *p.shape), visited=visited) if len(p.shape) > 1 else p
            for p in layer.params
        )
        router = (ParamSpec(f"{layer.prefix}.gate", (experts, spec.hidden_size)),)
        return replace(layer, params=params + router * routed)

    body = tuple(map(widened, spec.decoder_layers))
    return replace(spec, layers=(spec.embed, *body, spec.head))


@settings(max_examples=50)  # of two plans each
@given(specs, st.integers(1, 12), st.integers(1, 12), st.integers(1, 4))
def test_more_experts_never_cost_less(spec: ModelSpec, some: int, more: int, visited: int) -> None:
    fewer, many = sorted((max(some, visited), max(more, visited)))
    plans = [
        plan_for(mixture(spec, count, visited), MEASURED, RECOMPUTE) for count in (fewer, many)
    ]
    assert plans[0].host_bytes <= plans[1].host_bytes
    assert plans[0].device_bytes <= plans[1].device_bytes
    bounds = [plan.bounds for plan in plans]
    assert bounds[0] is not None
    assert bounds[1] is not None
    for part, seconds in bounds[0].parts.items():
        assert seconds <= bounds[1].parts[part]


@given(specs, st.integers(1, 8), st.data())
def test_only_experts_that_a_token_meets_are_computed(
    spec: ModelSpec, experts: int, data: st.DataObject
) -> None:
    visited = data.draw(st.integers(1, experts))
    found = mixture(spec, experts, visited, routed=False)
    assert found.num_active <= found.num_parameters
    assert (found.num_active == found.num_parameters) is (visited == experts)
    for index, dense in enumerate(spec.layers[1:-1], start=1):
        norm = dense.params[0].numel
        flops = layer_flops(found, index, 2, 8, whole=False)
        assert flops.forward == 2 * 16 * (norm + visited * (dense.numel - norm))
        assert flops.backward == 2 * flops.forward
    plan = plan_for(found, MEASURED)
    bounds = step_bounds(found, plan.decisions, MEASURED)
    assert bounds is not None
    assert bounds.flops == 6 * found.num_active * bounds.tokens


@given(specs, st.sampled_from([MEASURED, MachineSpec(1 << 50, "MemAvailable", 8, "cpu")]))
def test_one_expert_is_a_dense_layer(spec: ModelSpec, machine: MachineSpec) -> None:
    # Compiled, a stack of one keeps more: its products share their inputs with none.
    eager = {"pipeline": {"compile": False}}
    mixed = mixture(spec, 1, 1, routed=False)
    dense, one = plan_for(spec, machine, eager), plan_for(mixed, machine, eager)
    assert (one.lines, one.bounds) == (dense.lines, dense.bounds)


def test_one_real_expert_differs_from_a_dense_layer_by_its_router() -> None:
    dense, one = skeleton("llama", {}), skeleton("mixtral", ONE_EXPERT)
    routers = len(one.layers) * one.spec.hidden_size
    assert one.spec.num_parameters == dense.spec.num_parameters + routers
    assert one.spec.num_active == one.spec.num_parameters
    assert estimate(one) == pytest.approx(estimate(dense), rel=0.01)


def test_the_largest_decoder_layer_decides_slots_and_slabs() -> None:
    spec = make_spec(hidden=32)
    stack = mixture(spec, 8, 1).decoder_layers[1]
    mixed = replace(spec, layers=(spec.layers[0], spec.layers[1], stack, *spec.layers[3:]))
    decisions = plan_for(mixed, GPU).decisions
    assert decisions.slot_numel == decisions.slab_numel >= stack.numel > spec.layers[1].numel


def test_the_summary_names_both_numbers() -> None:
    found = mixture(make_spec(hidden=64), 8, 2)
    model = dict(plan_for(found, GPU).summary)["model"]
    assert model == (
        "TinyForCausalLM, 821.5k parameters (231.7k active: TFLOPS are of these), 3 layers"
    )


def skeleton(family: str, more: Mapping[str, object]) -> Skeleton:
    config = AutoConfig.for_model(family, **{**SIZES, **more})
    return make_skeleton(config, dtype=torch.bfloat16, attention="sdpa", to_train=False)


def estimate(made: Skeleton, tokens: int = TOKENS) -> int:
    """Of what is kept of the last layer and one row."""
    plan = plan_for(made.spec, sections={"data": {"max_length": tokens}})
    sizes = Sizes(made.spec, made.layouts, plan.decisions, on_gpu=False)
    return graph_bytes(sizes, made.spec.decoder_layers[-1])


def saved_bytes(made: Skeleton, layer: int, tokens: int = TOKENS) -> int:
    """What autograd keeps of one layer and one row, beside its weights and its input."""
    draw = torch.Generator().manual_seed(0)

    def flat(index: int) -> torch.Tensor:
        return torch.randn(made.layouts[index].numel, generator=draw).mul_(0.02).to(made.dtype)

    prologue, template = Prologue(made), LayerTemplate(made, layer)
    ids = torch.arange(tokens).remainder(made.spec.vocab_size)[None]
    hidden, args = prologue(prologue.leaves(flat(0)), ids)
    hidden, weights = hidden.detach().requires_grad_(), flat(layer + 1)
    given_storages = {t.untyped_storage().data_ptr() for t in (hidden, weights)}
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given_storages:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = template(template.leaves(weights), hidden, args[layer])
    assert out.shape == hidden.shape
    return sum(found.values())


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", {}),
        ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
        ("qwen3_moe", ROUTED | {"num_experts": 16}),
        (
            "qwen2_moe",
            ROUTED | {"num_experts": 16, "shared_expert_intermediate_size": 256},
        ),
        ("glm4_moe", ROUTED | {"n_routed_experts": 16, "first_k_dense_replace": 1}),
    ],
)
def test_the_estimate_of_a_kept_layer_is_what_autograd_keeps(
    family: str, more: dict[str, object]
) -> None:
    """Never less than that, and no further above for experts than for a dense layer."""
    made = skeleton(family, more)
    kept = saved_bytes(made, len(made.layers) - 1)
    assert kept <= estimate(made) <= 1.4 * kept


@pytest.mark.parametrize(("values", "uneven"), [(32, True), (48, False)])
def test_latent_attention_keeps_its_scores_on_the_cpu_where_keys_and_values_differ(
    values: int, uneven: bool
) -> None:
    made = skeleton("deepseek_v3", LATENT | {"v_head_dim": values})
    assert made.spec.uneven_heads is uneven
    short, long = (saved_bytes(made, 1, tokens) for tokens in (TOKENS, 2 * TOKENS))
    # Of twice as many tokens there are four times as many scores, and twice as much of all else.
    scores = (long - 2 * short) / 2 / TOKENS**2 / made.spec.num_heads
    assert scores == pytest.approx(4 if uneven else 0, abs=0.1)
    for kept, tokens in ((short, TOKENS), (long, 2 * TOKENS)):
        assert 0.95 * kept <= estimate(made, tokens) <= 1.4 * kept
