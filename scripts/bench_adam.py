"""Billions of parameters a second that AdamW updates, by threads and master format.

    python scripts/bench_adam.py --gib 8 [--threads 8 15 16] [--formats fp32_split] [--bind]

A store is updated layer by layer, all layers under way at once, as in a run with deferred updates.
GB/s counts each array once where it is read and once where it is written. The first round is left
out; the median of the others is shown.
"""

import argparse
import json
import os
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import psutil
import torch

from megatrain_cli.model.layout import make_layout
from megatrain_cli.model.spec import LayerSpec, ParamSpec
from megatrain_cli.optim.adamw import ALL_FORMATS, AdamStep
from megatrain_cli.optim.crew import optimizer_cores
from megatrain_cli.optim.worker import TileUpdater
from megatrain_cli.plan.tiles import TileFormat, store_bytes
from megatrain_cli.store.master import LayerTile, MasterStore
from megatrain_cli.units import GIB

NUM_LAYERS = 16
WIDTH = 1024


@dataclass(frozen=True)
class Result:
    """What one format reached with one number of threads."""

    format: str
    threads: int
    parameters: int
    seconds: float
    parameters_per_second: float
    bytes_per_second: float


def name_of(fmt: TileFormat) -> str:
    """The master mode, and where weights are their own FP32 master, their dtype."""
    return fmt.master if fmt.compute_dtype == "bfloat16" else f"{fmt.master}-{fmt.compute_dtype}"


FORMATS = {name_of(fmt): replace(fmt, keep_gradient=True) for fmt in ALL_FORMATS}


def make_store(fmt: TileFormat, num_bytes: int) -> MasterStore:
    """A store of about `num_bytes`, its weights and gradients random."""

    def layouts(rows: int) -> Iterator[LayerSpec]:
        for index in range(NUM_LAYERS):
            params = (ParamSpec("weight", (rows, WIDTH)), ParamSpec("bias", (WIDTH,)))
            yield LayerSpec(f"layer-{index:05}", "layer", params)

    row_bytes = sum(store_bytes(map(make_layout, layouts(99)), fmt).values()) // 100
    store = MasterStore(tuple(map(make_layout, layouts(max(1, num_bytes // row_bytes)))), fmt)
    values = torch.randn(store.tiles[0].layout.numel)
    for tile in store.tiles:
        assert tile.gradient is not None
        tile.weights.copy_(values)
        tile.gradient.copy_(values)
    return store


def traffic(tile: LayerTile) -> int:
    """Bytes that one update of the tile reads and writes."""
    both = [tile.remainder, tile.master, tile.exp_avg, tile.exp_avg_sq]
    # Beside an FP32 master the weights are only written.
    once = [tile.gradient, tile.weights, None if tile.master is not None else tile.weights]
    return sum(tensor.nbytes for tensor in both + both + once if tensor is not None)


def bench(name: str, store: MasterStore, threads: int, rounds: int, *, bind: bool) -> Result:
    """Update the whole store a few times."""
    cores = optimizer_cores(os.sched_getaffinity(0), threads) if bind else None
    parameters = sum(tile.layout.numel for tile in store.tiles)
    seconds = []
    with TileUpdater(threads, fmt=store.format, cores=cores) as updater:
        for number in range(1, rounds + 2):
            step = AdamStep(number, 1e-5, 0.9, 0.999, 1e-8, 0.01, grad_scale=0.5)
            futures = []
            for tile in store.tiles:
                assert tile.gradient is not None
                futures.append(updater.submit(tile, tile.gradient, 0, step))
            spans = [future.result() for future in futures]
            seconds.append(max(s.ended for s in spans) - min(s.began for s in spans))
    median = statistics.median(seconds[1:])
    num_bytes = sum(traffic(tile) for tile in store.tiles)
    return Result(name, threads, parameters, median, parameters / median, num_bytes / median)


def main() -> None:
    """Parse, run, print a table."""
    cores = len(os.sched_getaffinity(0))
    default = sorted({1, cores // 2, cores - 1, cores} - {0})
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=0.5, help="size of the store; default 0.5")
    parser.add_argument("--threads", type=int, nargs="+", default=default)
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=list(FORMATS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bind", action="store_true", help="bind threads to the first cores")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if min(args.rounds, *args.threads) < 1:
        parser.error("--rounds, --threads: wanted at least 1")
    if not 0 < args.gib * GIB <= psutil.virtual_memory().available:
        parser.error(f"--gib: {args.gib:g} is not above 0, or more than is free")
    results: list[Result] = []
    for name in args.formats:
        store = make_store(FORMATS[name], int(args.gib * GIB))
        results += [bench(name, store, n, args.rounds, bind=args.bind) for n in args.threads]
        store.close()
    if args.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
        return
    print("| masters | threads | parameters | s/update | G parameters/s | GB/s |")
    print("|---|---|---|---|---|---|")
    for r in results:
        print(
            f"| {r.format} | {r.threads} | {r.parameters / 1e6:.0f}M | {r.seconds:.3f} "
            f"| {r.parameters_per_second / 1e9:.2f} | {r.bytes_per_second / 1e9:.0f} |"
        )


if __name__ == "__main__":
    main()
