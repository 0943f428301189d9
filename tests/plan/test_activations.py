"""`activations: auto`: as many kept layers as fit, and inputs on the host only if they must be."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.plan.activations import Activations, choose_activations
from megatrain_cli.plan.decide import Before, Known
from megatrain_cli.plan.measured import Measured
from megatrain_cli.plan.plan import SPARE_BYTES, make_plan
from megatrain_cli.units import show_bytes
from tests.plan.small import GPU, layouts_of, make_config, make_spec, plan_for

LAYERS = 12
SPEC = make_spec(layers=LAYERS, hidden=256, vocab=300)


@given(st.integers(1, 40), st.integers(0, 60), st.integers(0, 9), st.integers(0, 9))
def test_the_largest_number_that_fits_is_found(
    layers: int, room: int, inputs: int, offloaded: int
) -> None:
    """Each kept layer takes 1 of `room`; inputs take some, and less once they are offloaded."""
    offloaded = min(inputs, offloaded)

    def fits(keep: int, offload: bool) -> bool:
        return keep + (offloaded if offload else inputs) <= room

    found = choose_activations(layers, fits)
    options = [
        Activations(keep, offload)
        for offload in (False, True)
        for keep in range(layers, -1, -1)
        if fits(keep, offload)
    ]
    if not options:
        assert found == Activations(0, False)
    elif options[0].keep_layers == layers:
        assert found == Activations(layers, False)
    else:
        assert found == options[0]


@given(st.integers(20, 34), st.booleans())
def test_a_plan_keeps_one_layer_less_than_would_not_fit(log_bytes: int, measured: bool) -> None:
    config = make_config({"train": {"micro_batch_size": 8}})
    machine = replace(GPU, device_bytes=(1 << 30) + (1 << log_bytes))
    graph = {SPEC.decoder_layers[0].kind: 5 << 20}
    known = Known(measured=Measured(graph, graph, 1 << 20, 8 * 64) if measured else None)
    plan = make_plan(config, SPEC, layouts_of(SPEC), machine, known)
    keep = plan.decisions.keep_layers
    if plan.shortfalls:
        assert keep == 0
        return
    room = machine.device_bytes - SPARE_BYTES
    assert keep == 0 or plan.device_bytes <= room
    if keep < LAYERS and not plan.decisions.offload:
        asked = {"keep_layers": keep + 1}
        more = make_config({"train": {"micro_batch_size": 8}, "pipeline": {"activations": asked}})
        assert make_plan(more, SPEC, layouts_of(SPEC), machine, known).device_bytes > room


@given(st.integers(22, 34), st.integers(0, LAYERS), st.booleans(), st.sampled_from([1, 2, 4]))
def test_what_was_chosen_before_is_chosen_wherever_it_fits(
    log_bytes: int, keep: int, offload: bool, joined: int
) -> None:
    """A resumed run may find other free memory, and its bits depend on both."""
    train = {"micro_batch_size": 2, "gradient_accumulation_steps": 4}
    machine = replace(GPU, device_bytes=(1 << 30) + (1 << log_bytes))
    spec, layouts = SPEC, layouts_of(SPEC)
    asked = make_config({"train": train})
    known = Known(before=Before(joined, keep, offload))
    found = make_plan(asked, spec, layouts, machine, known).decisions
    given = {"activations": {"keep_layers": keep, "offload": offload}}
    same = make_plan(
        make_config({"train": train, "pipeline": given}),
        spec,
        layouts,
        machine,
        Known(joined=joined),
    )
    if not same.shortfalls:
        assert (found.joined, found.keep_layers, found.offload) == (joined, keep, offload)
    else:
        assert found == make_plan(asked, spec, layouts, machine).decisions


def test_inputs_wait_on_the_host_only_where_the_device_cannot_hold_them() -> None:
    sections = {"train": {"micro_batch_size": 64}, "data": {"max_length": 4096}}
    free = plan_for(SPEC, GPU, {**sections, "pipeline": {"activations": "recompute"}})
    offload = {"activations": {"keep_layers": 0, "offload": True}}
    least = plan_for(SPEC, GPU, {**sections, "pipeline": offload})
    enough = free.device_bytes + SPARE_BYTES
    for device_bytes, wanted in ((enough, False), (enough - 1, True)):
        plan = plan_for(SPEC, replace(GPU, device_bytes=device_bytes), sections)
        assert plan.decisions.offload is wanted
        assert not plan.shortfalls
    nothing = plan_for(SPEC, replace(GPU, device_bytes=least.device_bytes - 1), sections)
    assert nothing.shortfalls


def test_offloading_is_not_advised_where_the_host_has_no_room_for_it() -> None:
    sections = {"train": {"micro_batch_size": 64}, "data": {"max_length": 4096}}
    least = plan_for(SPEC, GPU, {**sections, "pipeline": {"activations": "recompute"}})
    offload = {"activations": {"keep_layers": 0, "offload": True}}
    waiting = plan_for(SPEC, GPU, {**sections, "pipeline": offload})
    tight = replace(GPU, device_bytes=waiting.device_bytes - 1)
    for host_bytes, advised in ((waiting.host_bytes - 1, False), (waiting.host_bytes, True)):
        assert least.host_bytes <= host_bytes
        (line,) = plan_for(SPEC, replace(tight, host_bytes=host_bytes), sections).shortfalls
        assert ("offload: true" in line) is advised
        assert "`train.micro_batch_size: 32`" in line


@pytest.mark.parametrize("joined", [1, 2])
def test_advice_to_a_rehearsed_run_is_for_the_micro_batches_it_would_have(joined: int) -> None:
    """What was measured is of the micro-batch that does not fit, not of a smaller one."""
    rows, length, graph = 8, 64, 5 << 30
    kind = SPEC.decoder_layers[0].kind
    measured = Measured({kind: graph}, {kind: 2 * graph}, 1 << 20, joined * rows * length)
    known = Known(length=length, measured=measured, joined=joined)
    train = {"micro_batch_size": rows, "gradient_accumulation_steps": 2}
    config = make_config({"train": train, "pipeline": {"activations": "recompute"}})
    short = replace(GPU, device_bytes=1 << 30)
    (line,) = make_plan(config, SPEC, layouts_of(SPEC), short, known).shortfalls
    ways = {text.split(" frees ")[0]: text for text in line.split(". ", 1)[1].split("; ")}
    half = show_bytes(graph // 2)  # a layer at work has half the graph; inputs are small here
    for changes in (
        "`train.micro_batch_size: 4` with `train.gradient_accumulation_steps: 4`",
        "`data.max_length: 32`",
    ):
        freed = ways[changes].split(" frees ")[1].split(" (")[0]
        assert freed == half


@given(
    st.lists(st.integers(0, 1), min_size=1, max_size=6),
    st.tuples(st.integers(0, 50), st.integers(0, 50)),
    st.tuples(st.integers(0, 50), st.integers(0, 50)),
    st.integers(0, 80),
    st.integers(0, 6),
    st.integers(1, 3),
)
def test_graphs_and_work_are_billed_as_much_as_a_step_holds_at_most(
    kinds: list[int],
    graphs: tuple[int, int],
    extra: tuple[int, int],
    head: int,
    keep: int,
    micro_batches: int,
) -> None:
    """Forward, the head, and backward from the last layer to the first, for each micro-batch."""
    keep = min(keep, len(kinds))
    spec = make_spec(layers=len(kinds))
    layers = [
        replace(layer, kind=f"kind {i}")
        for layer, i in zip(spec.decoder_layers, kinds, strict=True)
    ]
    spec = replace(spec, layers=(spec.layers[0], *layers, spec.layers[-1]))
    live, most = 0, 0
    for i in kinds[len(kinds) - keep :]:
        live += micro_batches * graphs[i]
    most = live + head
    for index, i in reversed(list(enumerate(kinds))):
        for _ in range(micro_batches):
            kept = index >= len(kinds) - keep
            most = max(most, live + extra[i] + (0 if kept else graphs[i]))
            live -= graphs[i] if kept else 0
    assert live == 0
    measured = Measured(
        {f"kind {i}": graphs[i] for i in (0, 1)},
        {f"kind {i}": graphs[i] + extra[i] for i in (0, 1)},
        head,
        64,
    )
    train = {"micro_batch_size": 1, "gradient_accumulation_steps": micro_batches}
    config = make_config({"train": train, "pipeline": {"activations": {"keep_layers": keep}}})
    known = Known(measured=measured, joined=1)
    plan = make_plan(config, spec, layouts_of(spec), GPU, known)
    owners = ("kept activations", "one layer at work", "head chunk")
    billed = sum(line.num_bytes for line in plan.lines if line.owner in owners)
    assert billed == most


def test_measured_bytes_are_the_bill() -> None:
    kind = SPEC.decoder_layers[0].kind
    known = Known(measured=Measured({kind: 1000}, {kind: 5000}, 7000, 4 * 64), joined=1)
    config = make_config({"train": {"gradient_accumulation_steps": 2}})
    plan = make_plan(config, SPEC, layouts_of(SPEC), GPU, known)
    lines = {line.owner: line.num_bytes for line in plan.lines}
    assert lines["kept activations"] == 2 * LAYERS * 1000
    assert lines["one layer at work"] == 5000 - 1000  # its graph is among the kept ones
    assert lines["head chunk"] == 7000 - 4000
