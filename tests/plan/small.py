"""Specs, configs and machines to plan with; nothing is loaded or allocated."""

from collections.abc import Mapping

from hypothesis import strategies as st

from megatrain_cli.config.schema import TrainConfig
from megatrain_cli.model.layout import LayerLayout, make_layout
from megatrain_cli.model.spec import LayerSpec, ModelSpec, ParamSpec
from megatrain_cli.plan.decide import Known
from megatrain_cli.plan.machine import MachineSpec
from megatrain_cli.plan.machine_file import VERSION, Fingerprint, MachineFacts, MachineFile
from megatrain_cli.plan.plan import RunPlan, make_plan
from megatrain_cli.plan.rates import (
    Beside,
    ComputeRates,
    DiskRates,
    IssueCost,
    IssueTimes,
    LinkRate,
    MachineRates,
    ThreadRate,
)

CPU = MachineSpec(1 << 50, "MemAvailable", 8, "cpu")
GPU = MachineSpec(1 << 50, "MemAvailable", 8, "cuda:0", "NVIDIA H200", 1 << 50)

# Close to an H200 machine, in round numbers.
RATES = MachineRates(
    link=(
        LinkRate(1 << 20, 28e9, 26e9, 20e9),
        LinkRate(4 << 20, 44e9, 43e9, 35e9),
        LinkRate(16 << 20, 53e9, 54e9, 43e9),
        LinkRate(64 << 20, 54e9, 55e9, 44e9),
    ),
    copy=(ThreadRate(1, 6e9), ThreadRate(16, 40e9)),
    copy_to_pinned=(ThreadRate(1, 5e9), ThreadRate(16, 30e9)),
    read=(ThreadRate(1, 12e9), ThreadRate(16, 140e9)),
    adam=(ThreadRate(1, 0.7e9), ThreadRate(4, 2e9), ThreadRate(16, 4e9)),
    lockable_bytes=64 << 30,
    lockable_refused=False,
    compute=ComputeRates(700e12, 500e12, 600e12, IssueCost(1e-3, 2e-3), IssueCost(8e-4, 16e-4)),
    disk=DiskRates(2e9, 3e9, direct=True),
    beside=Beside(11e9, IssueTimes(2.0, 2.5), IssueTimes(1.4, 1.6)),
)


def measured_file(machine: MachineSpec, fingerprint: Fingerprint) -> MachineFile:
    """What `megatrain probe` might have stored."""
    return MachineFile(
        version=VERSION,
        date="2026-11-29T12:00:00+00:00",
        fingerprint=fingerprint,
        machine=machine,
        facts=MachineFacts(128 << 30, "cgroup v2", 16, "0-15", (), 0, None, "madvise"),
        notes=("one thing",),
    )


def make_spec(
    *, layers: int = 3, hidden: int = 16, vocab: int = 260, tied: bool = False
) -> ModelSpec:
    """A model whose layers are a norm and two matrices."""

    def layer(index: int) -> LayerSpec:
        prefix = f"layers.{index}"
        params = (
            ParamSpec(f"{prefix}.norm", (hidden,)),
            ParamSpec(f"{prefix}.up", (4 * hidden, hidden)),
            ParamSpec(f"{prefix}.down", (hidden, 4 * hidden)),
        )
        return LayerSpec(f"layer-{index:05d}", "decoder", params, prefix)

    head = (ParamSpec("norm", (hidden,)), ParamSpec("lm_head", (vocab, hidden)))
    return ModelSpec(
        architecture="TinyForCausalLM",
        hidden_size=hidden,
        vocab_size=vocab,
        layers=(
            LayerSpec("embed", "embed", (ParamSpec("embed_tokens", (vocab, hidden)),)),
            *map(layer, range(layers)),
            LayerSpec("head", "head", head[:1] if tied else head),
        ),
        tied=("embed_tokens",) if tied else (),
        has_dropout=False,
        max_positions=None,
        num_heads=4,
    )


def layouts_of(spec: ModelSpec) -> tuple[LayerLayout, ...]:
    """Of all layers."""
    return tuple(make_layout(layer) for layer in spec.layers)


def make_config(sections: Mapping[str, Mapping[str, object]] | None = None) -> TrainConfig:
    """A valid config with values laid over it, section by section."""
    values: dict[str, dict[str, object]] = {
        "model": {"path": "/model"},
        "data": {"train": "/train.jsonl", "max_length": 64},
        "train": {"output_dir": "/run", "max_steps": 1},
    }
    for section, given in (sections or {}).items():
        values.setdefault(section, {}).update(given)
    return TrainConfig.model_validate(values)


def plan_for(
    spec: ModelSpec,
    machine: MachineSpec = CPU,
    sections: Mapping[str, Mapping[str, object]] | None = None,
    *,
    can_pin: bool = True,
) -> RunPlan:
    """The plan of a spec."""
    return make_plan(make_config(sections), spec, layouts_of(spec), machine, Known(can_pin=can_pin))


specs = st.builds(
    make_spec,
    layers=st.integers(1, 5),
    hidden=st.integers(1, 40),
    vocab=st.integers(1, 3000),
    tied=st.booleans(),
)
machines = st.sampled_from([CPU, GPU])

Sections = dict[str, dict[str, object]]


def _sections(
    dtype_master: tuple[str, str],
    max_length: int,
    rows: int,
    accumulation: int,
    eager: bool,
    activations: object,
    memory: str,
    buffers: tuple[int, int],
) -> Sections:
    dtype, master = dtype_master
    update: dict[str, object] = {"update": "deferred"}
    if eager:
        update = {"update": "eager", "max_grad_norm": None}
    return {
        "model": {"dtype": dtype},
        "data": {"max_length": max_length},
        "train": {"micro_batch_size": rows, "gradient_accumulation_steps": accumulation},
        "optimizer": {"master": master, **update},
        "pipeline": {
            "activations": activations,
            "staging_buffers": buffers[0],
            "grad_slabs": buffers[1],
        },
        "store": {"memory": memory},
    }


sections = st.builds(
    _sections,
    st.sampled_from(
        [
            ("bfloat16", "fp32_split"),
            ("bfloat16", "bf16"),
            ("bfloat16", "bf16_stochastic"),
            ("bfloat16", "fp32"),
            ("float32", "fp32"),
        ]
    ),
    st.integers(1, 300),
    st.integers(1, 5),
    st.integers(1, 4),
    st.booleans(),
    st.one_of(
        st.sampled_from(["auto", "recompute", "keep"]),
        st.builds(
            lambda n, offload: {"keep_layers": n, "offload": offload},
            st.integers(0, 6),
            st.booleans(),
        ),
    ),
    st.sampled_from(["auto", "pageable"]),
    st.tuples(st.integers(1, 4), st.integers(1, 13)),
)


def bytes_of(plan: RunPlan, *owners: str) -> int:
    """What some owners have on the bill."""
    return sum(line.num_bytes for line in plan.lines if line.owner in owners)
