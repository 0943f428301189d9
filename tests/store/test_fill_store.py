"""Filling the store: every parameter once, one layer in memory at a time, any thread count."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

from megatrain_cli.errors import ModelError
from megatrain_cli.model.layout import make_layout
from megatrain_cli.model.spec import LayerSpec, ParamSpec
from megatrain_cli.plan.tiles import TileFormat
from megatrain_cli.store.load import fill_random, fill_store
from megatrain_cli.store.master import MasterStore

LAYERS = tuple(
    LayerSpec(
        f"layer-{i:05d}",
        "block",
        (ParamSpec(f"h.{i}.weight", (20, 30)), ParamSpec(f"h.{i}.bias", (20,))),
    )
    for i in range(5)
)


def make_store() -> MasterStore:
    fmt = TileFormat("bfloat16", "fp32_split", keep_gradient=True)
    return MasterStore(tuple(make_layout(layer) for layer in LAYERS), fmt)


def random_layer(layer: LayerSpec) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(int(layer.name[-5:]))
    for param in layer.params:
        yield param.name, torch.randn(param.shape, generator=generator)


class OneValue:
    """Yields the given tensors for each layer, whatever it is asked for."""

    def __init__(self, *values: tuple[str, torch.Tensor]) -> None:
        self.values = values

    def read(self, _: LayerSpec) -> Iterable[tuple[str, torch.Tensor]]:
        return self.values


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_random_values_do_not_depend_on_the_thread_count(threads: int) -> None:
    store = make_store()
    fill_random(store, random_layer, threads)
    for tile in store.tiles:
        for name, values in random_layer(tile.layout.layer):
            assert torch.equal(tile.read_master(name), values)
        assert not tile.exp_avg.any()


def test_a_failing_layer_is_raised_and_the_first_of_several_wins() -> None:
    def fail_from_two(layer: LayerSpec) -> Iterator[tuple[str, torch.Tensor]]:
        if layer.name >= "layer-00002":
            raise ModelError(f"{layer.name} failed")
        yield from random_layer(layer)

    for _ in range(5):
        with pytest.raises(ModelError, match="layer-00002 failed"):
            fill_random(make_store(), fail_from_two, threads=3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([("h.9.weight", torch.zeros(20, 30))], r"h\.9\.weight is not a parameter"),
        ([("h.0.bias", torch.zeros(20))] * 2, r"h\.0\.bias is filled twice"),
        ([("h.0.bias", torch.zeros(20))], r"nothing fills h\.0\.weight"),
        ([("h.0.bias", torch.zeros(21))], r"h\.0\.bias is \(21,\) torch\.float32, not floating"),
        ([("h.0.bias", torch.zeros(20, dtype=torch.int32))], r"h\.0\.bias is \(20,\) torch\.int32"),
    ],
)
def test_a_source_that_does_not_fit_is_refused_by_name(
    values: list[tuple[str, torch.Tensor]], message: str
) -> None:
    with pytest.raises(ModelError, match=f"layer-00000: {message}"):
        fill_store(make_store(), OneValue(*values))


# In a process of its own: the peak of this one would hide it.
PEAK = """
    import sys
    from pathlib import Path
    import torch
    from megatrain_cli.model.layout import make_layout
    from megatrain_cli.model.spec import LayerSpec, ModelSpec, ParamSpec
    from megatrain_cli.plan.tiles import TileFormat
    from megatrain_cli.probe.peaks import host_peak_bytes as peak
    from megatrain_cli.store.load import fill_store
    from megatrain_cli.store.master import MasterStore
    from megatrain_cli.store.source import SafetensorsSource

    layers = tuple(
        LayerSpec(f"layer-{i:05d}", "k", (ParamSpec(f"h.{i}.weight", (2048, 2048)),))
        for i in range(12)
    )
    fmt = TileFormat("bfloat16", "fp32_split", keep_gradient=True)
    torch.zeros(8).view(torch.int32).add_(1)
    before = peak()
    store = MasterStore(tuple(make_layout(layer) for layer in layers), fmt)
    spec = ModelSpec("T", 1, 1, layers, (), False, None)
    fill_store(store, SafetensorsSource(Path(sys.argv[1]), spec, base_prefix="model"))
    print(peak() - before, layers[0].numel)
"""


@pytest.mark.slow
def test_loading_peaks_at_the_final_state_plus_one_layer(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    values = {f"h.{i}.weight": torch.full((2048, 2048), float(i)) for i in range(12)}
    save_file(values, tmp_path / "model.safetensors")
    script = textwrap.dedent(PEAK)
    run = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], check=True, capture_output=True, text=True
    )
    peak, layer = map(int, run.stdout.split())
    # Weights and remainders are touched, gradients and moments not yet: 4 bytes a parameter. The
    # FP32 file has 4 more, as its pages stay while RAM is not short, and a layer of it is there
    # twice. The rest is the conversions' 4M-element pieces.
    assert peak < 2 * 12 * layer * 4 + layer * 4 + (96 << 20)


# Blocks of 1 MiB come from the heap of a thread, and their room stays there when it ends.
KEPT = """
    import sys
    import torch
    from contextlib import nullcontext
    from megatrain_cli.probe.peaks import host_resident_bytes
    from megatrain_cli.store.heap import lean_heap, settle_heap
    from megatrain_cli.store.load import fill_random
    from tests.store.test_fill_store import make_store, random_layer

    def make_layer(layer):
        blocks = [torch.ones(1 << 18) for _ in range(40)]
        return random_layer(layer)

    settle_heap()
    store = make_store()
    before = host_resident_bytes()
    with lean_heap() if sys.argv[1] == "lean" else nullcontext():
        fill_random(store, make_layer, threads=2)
    print(host_resident_bytes() - before)
"""


def test_what_threads_made_layers_of_is_given_back() -> None:
    root = Path(__file__).parents[2]

    def kept(how: str) -> int:
        run = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(KEPT), how],
            check=True,
            capture_output=True,
            text=True,
            cwd=root,
            env=os.environ | {"PYTHONPATH": str(root)},
        )
        return int(run.stdout)

    # Two threads, 40 blocks each. In one run of ten a small block, let go after the others, holds
    # the end of one thread's heap.
    settled = kept("settled")
    assert any(settled - kept("lean") > 60 << 20 for _ in range(3))
