"""Lines of the bill that no law holds: what was fitted to runs, by its formula."""

from dataclasses import replace

import pytest

from megatrain_cli.plan.memory import CPU_LATER_BYTES, CPU_PROGRAM_BYTES
from tests.plan.small import CPU, Sections, bytes_of, make_spec, plan_for


@pytest.mark.parametrize("now", [0, 300 << 20])
def test_the_program_is_as_large_as_it_is_now_and_what_comes_later(now: int) -> None:
    plan = plan_for(make_spec(), replace(CPU, program_bytes=now))
    [found] = [line.num_bytes for line in plan.lines if line.owner == "program and libraries"]
    assert found == (now or CPU_PROGRAM_BYTES) + CPU_LATER_BYTES


def test_kept_layers_leave_holes_as_large_as_hidden_states_in_the_heap() -> None:
    spec, length = make_spec(hidden=16), 64
    asked: Sections = {"data": {"max_length": length}, "train": {"micro_batch_size": 2}}
    kept = plan_for(spec, CPU, asked | {"pipeline": {"activations": "keep"}})
    layers, hidden_state = len(spec.decoder_layers), 2 * length * 16 * 2
    share = int(0.05 * bytes_of(kept, "kept activations"))
    assert bytes_of(kept, "allocator slack") == share + 3 * layers * hidden_state
    again = plan_for(spec, CPU, asked | {"pipeline": {"activations": "recompute"}})
    assert not bytes_of(again, "allocator slack")
