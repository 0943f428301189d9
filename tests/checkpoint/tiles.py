"""Small stores of every format, what a checkpoint says of them, and an optimizer that is slow."""

from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from megatrain_cli.checkpoint.facts import Facts, Pending
from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.checkpoint.manifest import Manifest
from megatrain_cli.checkpoint.save import Saver, Snapshot
from megatrain_cli.model.layout import LayerLayout, make_layout
from megatrain_cli.model.spec import LayerSpec, ParamSpec
from megatrain_cli.optim.adamw import AdamStep
from megatrain_cli.plan.tiles import TileFormat
from megatrain_cli.store.master import LayerTile, MasterStore
from tests.checkpoint.made import make_facts

FORMATS = [
    TileFormat("bfloat16", "fp32_split", keep_gradient=True),
    TileFormat("bfloat16", "bf16", keep_gradient=True),
    TileFormat("bfloat16", "bf16_stochastic", keep_gradient=False),
    TileFormat("bfloat16", "fp32", keep_gradient=True),
    TileFormat("float32", "fp32", keep_gradient=True),
]
SPLIT = FORMATS[0]


def layer(name: str, **params: tuple[int, ...]) -> LayerLayout:
    return make_layout(
        LayerSpec(name, "kind", tuple(ParamSpec(f"{name}.{k}", v) for k, v in params.items()))
    )


# Odd sizes and gaps everywhere; two layers of one shape.
LAYOUTS = (
    layer("embed", weight=(41, 33)),
    layer("layer-00000", up=(7, 9), bias=(7,), down=(64, 130)),
    layer("layer-00001", up=(7, 9), bias=(7,), down=(64, 130)),
    layer("head", norm=(33,), scale=(), out=(128, 3)),
)
# As `PipelineShape.updates` has it: the embedding not first, and the last decoder layer last.
ORDER = (1, 0, 3, 2)


def make_store(
    fmt: TileFormat = SPLIT, seed: int = 0, layouts: tuple[LayerLayout, ...] = LAYOUTS
) -> MasterStore:
    store = MasterStore(layouts, fmt)
    draw = torch.Generator().manual_seed(seed)
    for tile in store.tiles:
        for entry in tile.layout.entries:
            at = slice(entry.offset, entry.end)
            tile.write_master(entry.param.name, torch.randn(entry.param.shape, generator=draw))
            tile.exp_avg[at] = torch.randn(entry.param.numel, generator=draw)
            tile.exp_avg_sq[at] = torch.rand(entry.param.numel, generator=draw)
    return store


def fill_gradients(store: MasterStore, step: int) -> None:
    draw = torch.Generator().manual_seed(1000 + step)
    for tile in store.tiles:
        assert tile.gradient is not None
        for entry in tile.layout.entries:
            values = torch.randn(entry.param.numel, generator=draw)
            tile.gradient[entry.offset : entry.end] = values


def regions(tile: LayerTile, *, gradient: bool = False) -> list[torch.Tensor]:
    found = [tile.weights, tile.remainder, tile.master, tile.exp_avg, tile.exp_avg_sq]
    if gradient:
        found.append(tile.gradient)
    return [flat for flat in found if flat is not None]


def bits(store: MasterStore) -> list[bytes]:
    """All that outlives a step, gaps included."""
    return [
        flat.view(torch.uint8).numpy().tobytes() for tile in store.tiles for flat in regions(tile)
    ]


def set_bits(store: MasterStore, found: Iterable[bytes]) -> None:
    """The reverse of `bits`."""
    left = iter(found)
    for tile in store.tiles:
        for flat in regions(tile):
            flat.view(torch.uint8).copy_(torch.frombuffer(bytearray(next(left)), dtype=torch.uint8))


def facts_of(store: MasterStore, step: int, pending: int | None = None, **changes: object) -> Facts:
    layers = {
        tile.layout.layer.name: {
            entry.param.name: np.zeros(entry.param.shape, np.float32)
            for entry in tile.layout.entries
        }
        for tile in store.tiles
    }
    due = None
    if pending is not None:
        due = Pending(step=pending, learning_rate=(1e-3).hex(), grad_scale=(0.5).hex())
    return make_facts(layers, step=step).model_copy(update={"pending": due, **changes})


def snapshot_of(store: MasterStore, step: int, pending: int | None = None) -> Snapshot:
    aux = {"config.json": b"{}", "training/config.yaml": b"seed: 1\n", "tokenizer.json": b""}
    return Snapshot(facts_of(store, step, pending), aux)


def saver_of(
    store: MasterStore,
    run: Path,
    fs: FileSystem | None = None,
    order: tuple[int, ...] = ORDER,
    **args: Any,
) -> Saver:
    (run / "checkpoints").mkdir(parents=True, exist_ok=True)  # as the probe at the start does
    return Saver(store, run / "checkpoints", order, fs=fs or FileSystem(), **args)


def save(
    store: MasterStore,
    run: Path,
    step: int,
    pending: int | None = None,
    order: tuple[int, ...] = ORDER,
) -> Path:
    """Save and wait; returns the checkpoint."""
    saver = saver_of(store, run, order=order)
    assert saver.begin(snapshot_of(store, step, pending))
    (report,) = saver.wait()
    return report.folder


def manifest_of(folder: Path) -> Manifest:
    return Manifest.from_bytes((folder / "manifest.json").read_bytes())


def payloads(folder: Path) -> dict[str, bytes]:
    """What each part holds behind its header."""
    return {
        part.file: (folder / part.file).read_bytes()[part.data_start :]
        for part in manifest_of(folder).parts
    }


class Inline(Executor):
    """Does the work in `submit`."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001  the future's
            future.set_exception(error)
        return future


class SlowUpdater:
    """Changes tiles as an optimizer does: piece by piece, on other threads, half by half.

    Args:
        spawn: Starts a thread.
        pause: Called wherever others may come in between.
    """

    def __init__(self, spawn: Callable[[Callable[[], None]], object], pause: Callable[[], None]):
        self._spawn, self._pause = spawn, pause

    def submit(
        self, tile: LayerTile, gradient: torch.Tensor, start: int, step: AdamStep
    ) -> Future[None]:
        future: Future[None] = Future()
        at = [
            (max(start, entry.offset), min(start + gradient.numel(), entry.end))
            for entry in tile.layout.entries
        ]

        def work() -> None:
            self._pause()
            for first, end in at:
                if first < end:
                    middle = (first + end) // 2
                    for one in (slice(first, middle), slice(middle, end)):
                        for flat in regions(tile):
                            change(flat[one], step.step)
                        self._pause()
            future.set_result(None)

        self._spawn(work)
        return future


def change(flat: torch.Tensor, step: int) -> None:
    """Any change of all values that depends on the step; finite for ever."""
    if flat.dtype == torch.int16:
        flat += step
    else:
        flat.copy_(torch.sin(flat.float() + step))


def as_any(value: object) -> Any:
    """For stand-ins that mypy does not take for the real thing."""
    return cast("Any", value)


def pieces_of(numel: int, count: int) -> Iterable[tuple[int, int]]:
    size = -(-numel // count)
    return ((start, min(start + size, numel)) for start in range(0, numel, size))
