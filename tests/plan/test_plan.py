"""The bill adds up, never falls when more is asked for, and says what the engine then allocates."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from megatrain_cli.config.rules import find_conflicts
from megatrain_cli.config.schema import TrainConfig
from megatrain_cli.model.spec import ModelSpec
from megatrain_cli.plan.decide import Known
from megatrain_cli.plan.machine import MachineSpec
from megatrain_cli.plan.plan import RunPlan, make_plan
from megatrain_cli.plan.remedies import device_ways, host_ways
from megatrain_cli.plan.tiles import PAGE_BYTES
from megatrain_cli.store.master import MasterStore
from megatrain_cli.units import show_bytes
from tests.plan.small import (
    CPU,
    GPU,
    Sections,
    bytes_of,
    layouts_of,
    machines,
    make_config,
    make_spec,
    plan_for,
    sections,
    specs,
)
from tests.train.workspace import make_workspace, start

STORE = {
    *("weights", "gradients", "master remainders", "masters"),
    *("first moments", "second moments"),
}


def total(plan: RunPlan) -> int:
    return plan.host_bytes + plan.device_bytes


@given(specs, machines, sections)
def test_lines_add_up_and_each_owner_has_one(
    spec: ModelSpec, machine: MachineSpec, asked: Sections
) -> None:
    plan = plan_for(spec, machine, asked)
    assert total(plan) == sum(line.num_bytes for line in plan.lines)
    assert len({line.owner for line in plan.lines}) == len(plan.lines)
    for line in plan.lines:
        assert line.num_bytes > 0
        assert line.place in {"host pageable", "host pinned", "device"}
        assert line.formula
    if not machine.has_cuda:
        assert {line.place for line in plan.lines} == {"host pageable"}


@given(specs, machines, sections)
def test_the_store_takes_exactly_what_the_bill_says(
    spec: ModelSpec, machine: MachineSpec, asked: Sections
) -> None:
    plan = plan_for(spec, machine, asked)
    store = MasterStore(layouts_of(spec), plan.decisions.tile_format)
    assert bytes_of(plan, *STORE) == store.num_bytes
    store.close()


def asked_more(asked: Sections, section: str, key: str, more: int) -> Sections:
    before = asked[section][key]
    assert isinstance(before, int)
    return asked | {section: asked[section] | {key: before + more}}


MORE = [
    ("data", "max_length"),
    ("train", "micro_batch_size"),
    ("train", "gradient_accumulation_steps"),
    ("pipeline", "staging_buffers"),
    ("pipeline", "grad_slabs"),
]


@given(specs, machines, sections, st.sampled_from(MORE), st.integers(1, 50))
def test_more_tokens_slots_or_slabs_never_need_less(
    spec: ModelSpec, machine: MachineSpec, asked: Sections, key: tuple[str, str], more: int
) -> None:
    small, large = (plan_for(spec, machine, a) for a in (asked, asked_more(asked, *key, more)))
    assert large.host_bytes >= small.host_bytes
    assert large.device_bytes >= small.device_bytes


ONE_TOKEN: Sections = {"data": {"max_length": 1}, "train": {"micro_batch_size": 1}}


@given(
    st.integers(1, 4), st.integers(1, 30), st.integers(1, 2000), st.booleans(), machines, sections
)
@example(1, 23, 579, False, CPU, ONE_TOKEN)
def test_more_layers_width_or_vocabulary_never_need_less(
    layers: int, hidden: int, vocab: int, tied: bool, machine: MachineSpec, asked: Sections
) -> None:
    small = plan_for(
        make_spec(layers=layers, hidden=hidden, vocab=vocab, tied=tied), machine, asked
    )
    for more in (
        make_spec(layers=layers + 1, hidden=hidden, vocab=vocab, tied=tied),
        make_spec(layers=layers, hidden=hidden + 1, vocab=vocab, tied=tied),
        make_spec(layers=layers, hidden=hidden, vocab=vocab + 1, tied=tied),
    ):
        large = plan_for(more, machine, asked)
        # `keep` and offloading move a layer's bytes between places, so places are not compared.
        assert bytes_of(large, *STORE) >= bytes_of(small, *STORE)
        # Wider layers have larger slabs, and the ends, cut to their size, fill fewer of them. And
        # of a run that is whole pages a save copies less than of a shorter one.
        but = "gradient slabs", "checkpoint chunks"
        assert total(large) - bytes_of(large, *but) >= total(small) - bytes_of(small, *but)
        assert large.decisions.slab_numel >= small.decisions.slab_numel


@given(specs, machines, sections)
def test_more_precision_never_needs_less(
    spec: ModelSpec, machine: MachineSpec, asked: Sections
) -> None:
    def with_masters(dtype: str, master: str) -> int:
        other = asked | {
            "model": {"dtype": dtype},
            "optimizer": asked["optimizer"] | {"master": master},
        }
        return total(plan_for(spec, machine, other))

    bf16, split = with_masters("bfloat16", "bf16"), with_masters("bfloat16", "fp32_split")
    whole, fp32 = with_masters("bfloat16", "fp32"), with_masters("float32", "fp32")
    assert bf16 <= split <= whole
    # FP32 has one region less a layer, and each is rounded up to whole pages; eager updates keep no
    # gradient, so FP32 weights are then as small as BF16 ones with a remainder.
    assert split <= fp32 + PAGE_BYTES * len(spec.layers)


@given(specs, machines, sections, st.integers(0, 4))
def test_keeping_more_layers_needs_no_less_on_the_device(
    spec: ModelSpec, machine: MachineSpec, asked: Sections, keep: int
) -> None:
    fewer, more = (
        plan_for(
            spec,
            machine,
            asked | {"pipeline": asked["pipeline"] | {"activations": {"keep_layers": n}}},
        )
        for n in (keep, keep + 1)
    )
    assert total(more) >= total(fewer)
    assert more.device_bytes >= fewer.device_bytes


def test_buffers_that_would_lie_idle_are_not_planned() -> None:
    """However many are asked for, a plan takes no longer than its model has layers."""
    for spec in (make_spec(layers=1), make_spec(layers=5)):
        asked: Sections = {"pipeline": {"staging_buffers": 10**12, "grad_slabs": 10**12}}
        decisions = plan_for(spec, CPU, asked).decisions
        assert decisions.num_slots == len(spec.decoder_layers)
        assert decisions.num_slabs <= len(spec.layers) * 5  # 260 x 16 of the ends in slabs of 2304


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "asked",
    [
        [],
        ["train.micro_batch_size=1"],
        ["model.dtype=bfloat16", "optimizer.master=fp32_split", "pipeline.staging_buffers=3"],
        ["pipeline.activations={keep_layers: 1, offload: true}", "pipeline.grad_slabs=5"],
        ["pipeline.activations={keep_layers: 3, offload: true}"],
        ["pipeline.activations={keep_layers: 2, offload: true}", "data.max_length=33"],
        ["optimizer.update=eager", "optimizer.max_grad_norm=null", "pipeline.activations=keep"],
    ],
    ids=["plain", "one-row", "bf16", "offload", "offload-none", "offload-one", "eager"],
)
def test_the_engine_allocates_what_the_bill_says(
    tied: bool, asked: list[str], tmp_path: Path
) -> None:
    with start(make_workspace(tmp_path, tied=tied), asked) as run:
        plan, executor = run.engine.plan, run.engine.executor
        # Nothing but this test asks the executor what it holds.
        buffers, sums = executor._buffers, executor._compute._collector
        assert bytes_of(plan, "staging buffers") == nbytes(slot.flat for slot in buffers.slots)
        assert bytes_of(plan, "gradient buffers") == nbytes(buffers._gradients)
        all_sums = [*sums.head_sums, *sums.tied_sums, sums._sum]
        assert bytes_of(plan, "gradient sums") == nbytes(all_sums)
        hidden = buffers.hidden._flat
        inputs = [t for b, t in hidden.items() if b.kind in {"input", "ring"}]
        assert bytes_of(plan, "layer inputs") == nbytes(inputs)
        above = [t for b, t in hidden.items() if b.kind == "output_gradient"]
        assert bytes_of(plan, "output gradients") == nbytes(above)
        arena = buffers.hidden._arena
        assert bytes_of(plan, "offloaded inputs") == (arena.num_bytes if arena else 0)
        slabs = executor._moves._slabs
        assert slabs is not None
        assert bytes_of(plan, "gradient slabs") == slabs._arena.num_bytes
        assert bytes_of(plan, *STORE) == run.engine.store.num_bytes
        list(run.steps())  # and it is enough


@pytest.mark.parametrize("machine", [CPU, GPU])
def test_a_run_fits_to_the_last_byte_and_one_less_is_said(machine: MachineSpec) -> None:
    spec = make_spec()
    asked: Sections = {"pipeline": {"activations": "recompute"}}
    whole = plan_for(spec, machine, asked)
    exact = replace(machine, host_bytes=whole.host_bytes, device_bytes=whole.device_bytes)
    assert plan_for(spec, exact, asked).shortfalls == ()
    short = replace(exact, host_bytes=whole.host_bytes - 1, host_source="cgroup v2")
    (line,) = plan_for(spec, short, asked).shortfalls
    assert "may be taken (cgroup v2): 1 B are missing." in line
    if machine.has_cuda:
        short = replace(exact, device_bytes=whole.device_bytes - 1)
        (line,) = plan_for(spec, short, asked).shortfalls
        assert "on NVIDIA H200" in line
        assert "1 B are missing." in line


@given(specs, machines, sections)
def test_a_shortfall_advises_just_what_frees_memory_and_says_how_much(
    spec: ModelSpec, machine: MachineSpec, asked: Sections
) -> None:
    tiny = replace(machine, host_bytes=0, device_bytes=0)

    def needed(config: TrainConfig) -> tuple[int, int]:
        plan = make_plan(config, spec, layouts_of(spec), tiny)
        return plan.host_bytes, plan.device_bytes

    config = make_config(asked)
    shortfalls = plan_for(spec, tiny, asked).shortfalls
    for place, line in enumerate(shortfalls):
        length = config.data.max_length
        ways = host_ways(config, length, on_gpu=machine.has_cuda), device_ways(config, length)
        for way in ways[place]:
            freed = needed(config)[place] - needed(way.apply(config))[place]
            text = f"{way.text(config)} frees {show_bytes(freed)}"
            assert (text in line) == (freed > 0)
    assert len(shortfalls) == 1 + machine.has_cuda


def test_advice_names_keys_values_and_what_they_cost() -> None:
    asked: Sections = {"model": {"dtype": "float32"}, "optimizer": {"master": "fp32"}}
    tiny = replace(GPU, host_bytes=0, device_bytes=0)
    host, device = plan_for(make_spec(hidden=64), tiny, asked).shortfalls
    assert " `model.dtype: bfloat16` with `optimizer.master: fp32_split` frees " in host
    assert " with `optimizer.master: bf16_stochastic` frees " in host
    assert host.endswith(" (less exact); or use a machine with more RAM.")
    assert "`train.micro_batch_size: 2` with `train.gradient_accumulation_steps: 2` " in device
    assert " `pipeline.activations: {keep_layers: 0, offload: true}` frees " in device
    assert " (inputs wait in host RAM); `data.max_length: 32` frees " in device


def test_on_the_cpu_activations_are_host_memory_and_advice_says_how_to_need_less() -> None:
    asked: Sections = {"data": {"max_length": 4096}, "pipeline": {"activations": "keep"}}
    spec, tiny = make_spec(hidden=64), replace(CPU, host_bytes=0)
    [line] = plan_for(spec, tiny, asked).shortfalls
    assert " `pipeline.activations: recompute` frees " in line
    assert " `data.max_length: 2048` frees " in line
    assert "offload" not in line  # there is nowhere else for inputs to wait


@pytest.mark.parametrize("machine", [CPU, GPU])
def test_shorter_rows_are_half_of_those_that_there_are(machine: MachineSpec) -> None:
    config, spec = make_config({"data": {"max_length": 1 << 20}}), make_spec(hidden=64)
    tiny = replace(machine, host_bytes=0, device_bytes=0)
    plan = make_plan(config, spec, layouts_of(spec), tiny, Known(length=512))
    assert " `data.max_length: 256` frees " in plan.shortfalls[-1]


@given(sections)
def test_what_is_advised_is_a_config_that_can_be_trained_with(asked: Sections) -> None:
    kept: Sections = {"checkpoint": {"include_gradients": True}}
    eager = asked.get("optimizer", {}).get("update") == "eager"
    config = make_config(asked if eager else asked | kept)
    length = config.data.max_length
    for way in (*host_ways(config, length, on_gpu=False), *device_ways(config, length)):
        assert not list(find_conflicts(way.apply(config), frozenset()))


def test_where_nothing_helps_the_advice_is_a_sentence_all_the_same() -> None:
    asked: Sections = {
        "data": {"max_length": 1},
        "train": {"micro_batch_size": 1},
        "pipeline": {
            "activations": {"keep_layers": 0, "offload": True},
            "staging_buffers": 1,
        },
    }
    _, device = plan_for(make_spec(), replace(GPU, host_bytes=0, device_bytes=0), asked).shortfalls
    assert " are missing. Use a GPU with more memory." in device


def test_the_summary_says_what_was_decided() -> None:
    asked: Sections = {
        "train": {"micro_batch_size": 4, "gradient_accumulation_steps": 3},
        "optimizer": {"learning_rate": 3e-4, "threads": 5},
        "pipeline": {"staging_buffers": 3, "activations": {"keep_layers": 1, "offload": True}},
    }
    spec = make_spec(tied=True)
    assert dict(plan_for(spec, GPU, asked).summary) == {
        "model": "TinyForCausalLM, 10.37k parameters, 3 layers, tied head",
        "device": "NVIDIA H200",
        "compute": "bfloat16, attention sdpa, compiled",
        "masters": "fp32_split, updates deferred on 5 threads",
        "store": "page-locked in place",
        "gradients": "straight into the tiles",
        "staging": "3 buffers of 4.25 KiB, embedding and head apart",
        "activations": "1 of 3 layers kept, 2 computed twice (+22 % work), inputs offloaded",
        "step": "1 x 12 rows of up to 64 tokens, 3 micro-batches at once",
        "learning rate": "0.0003, cosine",
        "checkpoint": "121.5 KiB each, the folder up to 364.5 KiB (3 of them)",
        "step takes": "run `megatrain probe` to see seconds",
    }
    on_cpu = dict(plan_for(spec, CPU, asked).summary)
    assert on_cpu["device"] == "CPU"
    assert on_cpu["store"] == "pageable"
    assert on_cpu["gradients"] == "6 slabs"  # the step has no more pieces
    assert on_cpu["step"] == "12 x 1 row of up to 64 tokens"


@given(specs, machines, sections)
def test_a_plan_is_json(spec: ModelSpec, machine: MachineSpec, asked: Sections) -> None:
    plan = plan_for(spec, replace(machine, host_bytes=0), asked)
    read = json.loads(json.dumps(plan.to_json()))
    assert read["fits"] is False
    assert read["shortfalls"] == list(plan.shortfalls)
    assert read["host_peak_bytes"] == plan.host_bytes
    assert read["gpu_peak_bytes"] == plan.device_bytes
    assert sum(line["num_bytes"] for line in read["lines"]) == total(plan)
