"""Every `auto` becomes a value, by a rule that can be looked up here."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.plan.decide import (
    HEAD_CHUNK_BYTES,
    PASS_TOKENS,
    WHOLE_CHUNK,
    WHOLE_CHUNK_BYTES,
    Decisions,
    Known,
    ways_to_join,
)
from megatrain_cli.plan.machine import MachineSpec
from megatrain_cli.plan.plan import SPARE_BYTES, RunPlan, make_plan
from tests.plan.small import CPU, GPU, Sections, layouts_of, make_config, make_spec, plan_for

SPEC = make_spec()


def decided(
    machine: MachineSpec = CPU, sections: Sections | None = None, *, can_pin: bool = True
) -> Decisions:
    return plan_for(SPEC, machine, sections, can_pin=can_pin).decisions


PAGEABLE: Sections = {"store": {"memory": "pageable"}}
EAGER: Sections = {"optimizer": {"update": "eager", "max_grad_norm": None}}


def test_auto_attention_is_sdpa_and_another_is_kept() -> None:
    assert decided().attention == "sdpa"
    assert decided(CPU, {"model": {"attention": "eager"}}).attention == "eager"


def test_auto_updates_are_deferred_with_or_without_clipping() -> None:
    assert not decided().eager
    assert not decided(CPU, {"optimizer": {"max_grad_norm": None}}).eager
    assert decided(CPU, EAGER).eager


def test_a_tile_has_room_for_its_gradient_unless_updates_are_eager() -> None:
    assert decided().tile_format.keep_gradient
    assert not decided(CPU, EAGER).tile_format.keep_gradient


@pytest.mark.parametrize(("machine", "cores", "threads"), [(CPU, 8, 8), (GPU, 8, 7), (GPU, 1, 1)])
def test_auto_threads_are_all_cores_but_one_to_feed_a_gpu(
    machine: MachineSpec, cores: int, threads: int
) -> None:
    assert decided(replace(machine, num_cores=cores)).threads == threads
    assert decided(machine, {"optimizer": {"threads": 3}}).threads == 3


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (15, 14), (16, 11), (64, 59)])
def test_threads_that_pack_a_pageable_store_get_cores_where_there_are_enough(
    cores: int, threads: int
) -> None:
    machine = replace(GPU, num_cores=cores)
    assert decided(machine, PAGEABLE).threads == threads
    assert decided(machine, can_pin=False).threads == threads  # the driver refused
    assert decided(machine, PAGEABLE | {"optimizer": {"threads": 15}}).threads == 15
    assert decided(replace(CPU, num_cores=cores), PAGEABLE).threads == cores


@pytest.mark.parametrize(("accumulation", "slabs"), [(1, 2), (2, 3), (3, 5), (8, 7)])
def test_auto_slabs_are_one_and_a_half_a_micro_batch_two_at_least_and_no_more_than_pieces(
    accumulation: int, slabs: int
) -> None:
    sections: Sections = {
        "train": {"gradient_accumulation_steps": accumulation},
        "pipeline": {"grad_slabs": "auto"},
        "store": {"memory": "pageable"},
    }
    assert decided(GPU, sections).num_slabs == slabs
    assert decided(CPU, sections).num_slabs == slabs


def test_a_store_is_page_locked_on_a_gpu_unless_asked_or_refused() -> None:
    assert decided(GPU).pin_store
    assert not decided(GPU, {"store": {"memory": "pageable"}}).pin_store
    assert not decided(GPU, can_pin=False).pin_store
    assert not decided(CPU).pin_store


def test_only_page_locked_tiles_with_deferred_updates_need_no_slabs() -> None:
    assert decided(GPU).num_slabs == 0
    assert decided(GPU, EAGER).num_slabs == 7
    assert decided(GPU, can_pin=False).num_slabs == 7
    assert decided(CPU).num_slabs == 7


@given(
    st.integers(1, 64),
    st.integers(1, 24),
    st.sampled_from([1, 64, 1024, 5000, 40000]),
    st.booleans(),
)
def test_micro_batches_are_joined_up_to_a_bound_where_they_fit(
    rows: int, accumulation: int, length: int, dropout: bool
) -> None:
    sections: Sections = {
        "train": {"micro_batch_size": rows, "gradient_accumulation_steps": accumulation},
        "data": {"max_length": length},
    }
    spec = replace(SPEC, has_dropout=dropout)
    found = plan_for(spec, GPU, sections).decisions
    assert found.micro_batch_size == rows * found.joined
    assert found.num_micro_batches * found.joined == accumulation
    assert found.joined == 1 or found.micro_batch_size * length <= PASS_TOKENS
    more = [n for n in range(found.joined + 1, accumulation + 1) if accumulation % n == 0]
    assert dropout or all(rows * n * length > PASS_TOKENS for n in more)
    assert found.joined == 1 or not dropout
    # One byte less than is needed for that: fewer at once.
    whole = plan_for(spec, GPU, {**sections, "pipeline": {"activations": "recompute"}})
    if whole.decisions.joined > 1:
        tight = replace(GPU, device_bytes=whole.device_bytes + SPARE_BYTES - 1)
        asked: Sections = {**sections, "pipeline": {"activations": "recompute"}}
        assert plan_for(spec, tight, asked).decisions.joined < whole.decisions.joined


@given(st.sampled_from([1, 2, 4, 6, 12]), st.integers(0, 40), st.booleans())
def test_a_run_that_fits_with_some_micro_batches_at_once_fits(
    accumulation: int, mib: int, large: bool
) -> None:
    """A single pass needs no sum of gradients, so many at once may take less than one by one."""
    spec = make_spec(hidden=256, vocab=20000 if large else 260)
    train = {"micro_batch_size": 1, "gradient_accumulation_steps": accumulation}
    config = make_config({"train": train, "pipeline": {"activations": "recompute"}})
    layouts = layouts_of(spec)

    def planned(device_bytes: int, joined: int | None = None) -> RunPlan:
        there = replace(GPU, device_bytes=device_bytes)
        return make_plan(config, spec, layouts, there, Known(joined=joined), advised=False)

    whole = planned(GPU.device_bytes)
    limit = whole.device_bytes + (mib << 20)
    assert whole.decisions.joined == accumulation
    assert not planned(limit).missing
    for joined in ways_to_join(config, spec, GPU, Known()):
        needed = planned(limit, joined).device_bytes
        assert not planned(needed).missing
        assert planned(needed - 1).missing or planned(needed - 1).device_bytes < needed


@given(st.integers(1, 24), st.integers(1, 24))
def test_advice_never_joins_more_micro_batches_than_it_has(tried: int, accumulation: int) -> None:
    """Those that passed at once on the device were of another number."""
    config = make_config({"train": {"gradient_accumulation_steps": accumulation}})
    known = Known(joined=tried)
    ways = ways_to_join(config, SPEC, GPU, known)
    assert all(accumulation % joined == 0 for joined in ways)
    assert ways == (tried,) or accumulation % tried


@pytest.mark.parametrize(
    ("positions", "known", "length"),
    [(None, None, 1000), (990, None, 990), (990, 1000, 990), (990, 640, 640), (2000, None, 1000)],
)
def test_padding_ends_where_the_positions_of_the_model_do(
    positions: int | None, known: int | None, length: int
) -> None:
    spec = replace(SPEC, max_positions=positions)
    config = make_config({"data": {"max_length": 1000}})
    plan = make_plan(config, spec, layouts_of(spec), GPU, Known(length=known))
    assert plan.decisions.max_length == length


def test_a_cpu_takes_rows_one_by_one_and_as_many_of_them() -> None:
    sections: Sections = {"train": {"micro_batch_size": 4, "gradient_accumulation_steps": 3}}
    cpu, gpu = decided(CPU, sections), decided(GPU, sections)
    assert (cpu.micro_batch_size, cpu.num_micro_batches) == (1, 12)
    assert (gpu.micro_batch_size, gpu.num_micro_batches) == (12, 1)


@pytest.mark.parametrize(
    ("activations", "keep", "offload"),
    [
        ("auto", 3, False),  # there is room
        ("recompute", 0, False),
        ("keep", 3, False),
        ({"keep_layers": 2}, 2, False),
        ({"keep_layers": 9, "offload": True}, 3, True),
    ],
)
def test_activations_become_a_number_of_layers(
    activations: object, keep: int, offload: bool
) -> None:
    found = decided(CPU, {"pipeline": {"activations": activations}})
    assert (found.keep_layers, found.offload) == (keep, offload)


@pytest.mark.parametrize(
    ("machine", "sections", "compiled"),
    [
        (GPU, {}, True),
        (GPU, {"pipeline": {"compile": True}}, True),
        (GPU, {"pipeline": {"compile": False}}, False),
        (CPU, {}, False),  # each row has its own length there
    ],
)
def test_layers_are_compiled_on_a_gpu_unless_refused(
    machine: MachineSpec, sections: Sections, compiled: bool
) -> None:
    found = decided(machine, sections)
    assert found.compiled is compiled
    assert (found.whole_chunk > 0) is compiled


def test_a_model_with_dropout_is_not_compiled() -> None:
    """Two compiled forms of one layer draw other masks from the same seed."""
    spec = replace(SPEC, has_dropout=True)
    assert not plan_for(spec, GPU).decisions.compiled


@given(st.integers(1, 64), st.integers(1, 1 << 20))
def test_a_whole_chunk_is_no_larger_than_the_rows_and_its_bound(rows: int, vocab: int) -> None:
    sections: Sections = {"train": {"micro_batch_size": rows}}
    found = plan_for(make_spec(hidden=1, vocab=vocab), GPU, sections).decisions
    assert found.whole_chunk % 64 == 0
    assert 64 <= found.whole_chunk <= min(WHOLE_CHUNK, rows * 64)
    assert found.whole_chunk == 64 or found.whole_chunk * vocab * 2 <= WHOLE_CHUNK_BYTES


@pytest.mark.parametrize("tied", [False, True])
def test_a_slot_holds_the_largest_decoder_layer_and_the_ends_have_their_own(tied: bool) -> None:
    for vocab in (4, 3000):
        spec = make_spec(vocab=vocab, tied=tied)
        embed, *body, head = [layout.numel for layout in layouts_of(spec)]
        found = plan_for(spec).decisions
        assert found.slot_numel == max(body)
        assert found.ends_numel == (embed + head if tied else max(embed, head))


@given(st.integers(1, 1 << 22))
def test_a_chunk_of_the_head_has_bounded_logits(vocab: int) -> None:
    chunk = plan_for(make_spec(hidden=1, vocab=vocab)).decisions.head_chunk
    assert chunk >= 64
    assert chunk % 64 == 0
    assert chunk == 64 or 4 * chunk * vocab <= HEAD_CHUNK_BYTES
    assert 4 * (chunk + 64) * vocab > HEAD_CHUNK_BYTES
