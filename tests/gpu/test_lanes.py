"""`CudaLanes` computes what blocking lanes compute, bit for bit, however the copies are delayed.

Eager attention: its kernels repeat bit for bit, so that every difference is a race. Fused attention
is compared with the CPU within a bound.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from megatrain_cli.errors import NumericsError
from megatrain_cli.pipeline.cuda_lanes import CudaLanes
from megatrain_cli.pipeline.ops import Kind, Lane
from tests.engine import (
    BlockingLanes,
    CarelessLanes,
    Outcome,
    Settings,
    SlowLanes,
    inline,
    run,
    write_config,
)

pytestmark = pytest.mark.gpu

SMALL: Settings = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
CUDA: Settings = {"device": "cuda"}
EAGER: Settings = {"attention": "eager", "path": "model", "init": "random"}


def small(folder: Path, sections: Mapping[str, Settings], *, tied: bool = False) -> Path:
    return write_config(
        folder,
        {**SMALL, "tie_word_embeddings": tied},
        {"pipeline": CUDA, "model": EAGER, **sections},
    )


VARIANTS: dict[str, Mapping[str, Settings]] = {
    "registered": {},
    "pageable": {"store": {"memory": "pageable"}},
    "two slabs": {"store": {"memory": "pageable"}, "pipeline": {**CUDA, "grad_slabs": 2}},
    "one slot": {"pipeline": {**CUDA, "staging_buffers": 1}},
    "three slots": {"pipeline": {**CUDA, "staging_buffers": 3}},
    "kept": {"pipeline": {**CUDA, "activations": "keep"}},
    "two kept, inputs offloaded": {
        "pipeline": {**CUDA, "activations": {"keep_layers": 2, "offload": True}}
    },
    "all offloaded": {"pipeline": {**CUDA, "activations": {"keep_layers": 0, "offload": True}}},
    "three micro-batches": {"train": {"gradient_accumulation_steps": 3}},
    "eager updates": {"optimizer": {"update": "eager", "max_grad_norm": None}},
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run(small(tmp_path_factory.mktemp("plain"), {}), BlockingLanes)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("tied", [False, True])
def test_three_streams_compute_what_blocking_lanes_compute(
    name: str, tied: bool, tmp_path: Path
) -> None:
    config = small(tmp_path, VARIANTS[name], tied=tied)
    assert run(config, CudaLanes).same_bits(run(config, BlockingLanes))


@pytest.mark.parametrize("name", ["registered", "two slabs", "eager updates"])
def test_updates_that_go_on_after_the_call_change_no_bit(name: str, tmp_path: Path) -> None:
    config = small(tmp_path, VARIANTS[name])
    with ThreadPoolExecutor(4) as pool:
        later = run(config, CudaLanes, later=pool.submit)
    assert later.same_bits(run(config, BlockingLanes))


@pytest.mark.parametrize("name", ["registered", "two slabs", "kept", "all offloaded"])
def test_spans_tell_what_happened_on_one_clock(name: str, tmp_path: Path) -> None:
    """What waits for another op starts after its end, on whatever lane; within the clocks' error.

    Distances of events are exact to a microsecond on the device; the host is placed to within the
    time that a thread takes to wake.
    """
    for spans in run(small(tmp_path, VARIANTS[name]), CudaLanes).spans:
        ops = [span for span in spans if span.waits_for is None]
        assert all(span.start <= span.end for span in spans)
        for lane in (Lane.STREAM_IN, Lane.COMPUTE, Lane.STREAM_OUT):
            one = [span for span in ops if span.lane is lane]
            assert all(a.end <= b.start + 1e-5 for a, b in pairwise(one))
        moves = [s for s in ops if s.kind in (Kind.STREAM_IN, Kind.STREAM_OUT)]
        assert all(span.num_bytes > 0 for span in moves)
        (clip,) = [span for span in ops if span.kind is Kind.CLIP]
        (report,) = [span for span in ops if span.kind is Kind.REPORT]
        assert report.end <= clip.start + 1e-3
        backward = {s.layer: s for s in ops if s.kind in (Kind.LOSS, Kind.BACKWARD)}
        for span in moves:
            if span.kind is Kind.STREAM_OUT:
                assert backward[span.layer].end <= span.start + 1e-5
        arrived = {s.layer: s for s in reversed(moves) if s.kind is Kind.STREAM_IN}
        forward = {s.layer: s for s in reversed(ops) if s.lane is Lane.COMPUTE and s is not report}
        assert forward.keys() == arrived.keys()
        for layer, first in forward.items():
            assert arrived[layer].end <= first.start + 1e-5


@pytest.mark.parametrize("name", [n for n in VARIANTS if "micro" not in n and "eager" not in n])
def test_where_memory_comes_from_changes_no_bit(name: str, plain: Outcome, tmp_path: Path) -> None:
    assert run(small(tmp_path, VARIANTS[name]), CudaLanes).same_bits(plain)


@pytest.mark.parametrize(
    "slow",
    [(Lane.STREAM_IN,), (Lane.COMPUTE,), (Lane.STREAM_OUT,), (Lane.STREAM_IN, Lane.STREAM_OUT)],
)
@pytest.mark.parametrize("name", ["registered", "two slabs", "kept", "all offloaded"])
def test_slow_copies_change_no_bit(
    slow: tuple[Lane, ...], name: str, plain: Outcome, tmp_path: Path
) -> None:
    config = small(tmp_path, VARIANTS[name])
    assert run(config, partial(SlowLanes, slow=slow), poison=True).same_bits(plain)


@pytest.mark.parametrize(
    ("slow", "careless"),
    [
        (Lane.STREAM_IN, Lane.COMPUTE),  # computes before weights have arrived
        (Lane.COMPUTE, Lane.STREAM_IN),  # weights arrive under a running layer
        (Lane.COMPUTE, Lane.STREAM_OUT),  # gradients leave before they are complete
    ],
)
def test_a_lane_that_forgets_its_waits_is_caught(
    slow: Lane, careless: Lane, plain: Outcome, tmp_path: Path
) -> None:
    lanes = partial(CarelessLanes, slow=(slow,), careless=careless)
    try:
        caught = not run(small(tmp_path, {}), lanes).same_bits(plain)
    except NumericsError:  # memory that was never written may well be NaN
        caught = True
    assert caught


def test_layers_of_very_poor_arithmetic_density_change_no_bit(tmp_path: Path) -> None:
    """Two tokens through large layers: copies take far longer than compute."""
    config = write_config(
        tmp_path,
        {**SMALL, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16},
        {"model": EAGER, "pipeline": CUDA, "train": {"micro_batch_size": 1}},
    )
    assert run(config, CudaLanes, length=2).same_bits(run(config, BlockingLanes, length=2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hidden", "intermediate"), [(256, 512), (1024, 4096), (4096, 8192), (8192, 16384)]
)
def test_layers_from_one_mib_to_over_one_gib_change_no_bit(
    hidden: int, intermediate: int, tmp_path: Path
) -> None:
    config = write_config(
        tmp_path,
        {**SMALL, "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": 3},
        {
            "model": EAGER,
            "pipeline": {**CUDA, "activations": {"keep_layers": 1, "offload": False}},
        },
    )
    slow = partial(SlowLanes, slow=(Lane.STREAM_IN,))
    assert run(config, slow, steps=2, poison=True).same_bits(run(config, BlockingLanes, steps=2))


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_step_is_issued_without_waiting_for_the_device(tmp_path: Path) -> None:
    """PyTorch raises for every call of any thread that would wait for the device.

    The events of the step that the host's lanes wait for are meant; spans are read, too.
    """
    config = write_config(tmp_path, SMALL, {"pipeline": CUDA})  # fused attention
    run(config, CudaLanes, around=waiting_is_an_error())


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_gpu_agrees_with_the_cpu(attention: str, tmp_path: Path) -> None:
    """BF16 kernels round differently on two devices: up to 2^-6 of a layer's largest gradient."""
    section = {**EAGER, "attention": attention}
    gpu = run(small(tmp_path / "gpu", {"model": section}), CudaLanes, steps=1)
    config = small(tmp_path / "cpu", {"model": section, "pipeline": {"device": "cpu"}})
    cpu = run_on_cpu(config)
    assert abs(gpu.losses[0] - cpu.losses[0]) < 2e-3
    for a, b in zip(gpu.gradients, cpu.gradients, strict=True):
        assert (a.float() - b.float()).abs().max() <= 2**-6 * b.float().abs().max()


def run_on_cpu(config: Path) -> Outcome:
    return run(config, inline, steps=1)
