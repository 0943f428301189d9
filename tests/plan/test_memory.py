"""Lines of the bill that no law holds: what was fitted to runs, by its formula."""

from dataclasses import replace

import pytest

from megatrain_cli.plan.memory import ALLOCATOR_BYTES, CPU_LATER_BYTES, CPU_PROGRAM_BYTES
from tests.plan.small import CPU, GPU, Sections, bytes_of, make_spec, plan_for


@pytest.mark.parametrize("now", [0, 300 << 20])
def test_the_program_is_as_large_as_it_is_now_and_what_comes_later(now: int) -> None:
    plan = plan_for(make_spec(), replace(CPU, program_bytes=now))
    [found] = [line.num_bytes for line in plan.lines if line.owner == "program and libraries"]
    assert found == (now or CPU_PROGRAM_BYTES) + CPU_LATER_BYTES


def test_kept_layers_leave_holes_as_large_as_hidden_states_in_the_heap() -> None:
    spec, length = make_spec(hidden=16, layers=12), 64
    asked: Sections = {"data": {"max_length": length}, "train": {"micro_batch_size": 2}}
    kept = plan_for(spec, CPU, asked | {"pipeline": {"activations": "keep"}})
    layers, hidden_state = len(spec.decoder_layers), 2 * length * 16 * 2
    share = int(0.05 * bytes_of(kept, "kept activations"))
    assert bytes_of(kept, "allocator slack") == share + 3 * layers * hidden_state


RECOMPUTE: Sections = {"pipeline": {"activations": "recompute"}}


def test_a_layer_computed_again_leaves_its_small_blocks_in_the_heap_beside_the_head() -> None:
    """160M in FP32 on rows of 256 took 57 to 75 MiB more than was planned without."""
    spec = make_spec(hidden=64, vocab=2000)
    plan = plan_for(spec, CPU, RECOMPUTE)
    layer = bytes_of(plan, "one layer at work")  # all of its blocks are small
    assert bytes_of(plan, "allocator slack") == layer
    # All of the head's comes on top: logits and gradients of 64 positions, the weight's gradient.
    assert bytes_of(plan, "head chunk") > 64 * 2000 * 12 + 64 * 2000 * 2
    on_gpu = plan_for(spec, GPU, RECOMPUTE)
    assert bytes_of(on_gpu, "allocator slack") == ALLOCATOR_BYTES


def test_blocks_that_are_mapped_leave_nothing_but_what_shorter_rows_have_of_them() -> None:
    spec = make_spec(hidden=2048)  # gradients of 32 MiB
    short, long, longer = (
        bytes_of(
            plan_for(spec, CPU, RECOMPUTE | {"data": {"max_length": length}}), "allocator slack"
        )
        for length in (64, 2048, 8192)
    )
    assert short < long <= longer < 1.1 * long
