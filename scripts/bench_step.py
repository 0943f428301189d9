"""Seconds a step, tokens a second and TFLOPS of megatrain's own loop at published model shapes.

    python scripts/bench_step.py 3b --batch 8x1024 32x1024 --accumulation 1 8
    python scripts/bench_step.py 70b:4 --variant store.memory=auto --variant store.memory=pageable

A batch is what one optimizer step takes; `--accumulation` cuts it into micro-batches. Every
combination of batch, accumulation and variant is one run of a few steps. Runs of a shape use one
store as long as they keep it in one way: it is filled and page-locked once, and later runs train on
from there. Weights and tokens are random, so nothing is downloaded.

The first steps are left out of the medians. Memory on the host is the process's own, and includes
this script. What the columns are is told below the tables.
"""

import argparse
import itertools
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.shapes import Batch, parse_batch, parse_shape

if TYPE_CHECKING:
    from scripts.bench_run import Result

SPEEDS = (
    *("s/step", "planned", "tokens/s", "TFLOPS", "kept layers", "link in", "link out", "GPU GiB"),
    *("GPU plan", "host GiB", "in steps", "host plan", "B/parameter", "floor s", "x floor"),
    *("floor is", "wall s"),
)

LEGEND = """\
- s/step, tokens/s, TFLOPS: medians of the steps that are timed; supervised tokens; 6 x parameters x
  tokens, so what is computed twice counts once. planned: seconds that the plan in force forecast,
  with the rates that `megatrain probe` measured. kept layers: those that are computed once.
- link in, link out: of what the link could have carried to the device, from it, while copies were
  under way there: bytes / (seconds alone x peak alone + seconds both ways x peak both ways), with
  the peaks that `megatrain probe` measured.
- GPU GiB, GPU plan: all that was in use on the device, at most; all that the plan bills to it.
- host GiB, in steps, host plan: the peak resident set of this process; the largest one after a
  step; what the plan bills to the host. In brackets where the process had run something before:
  what compiling that left behind is in them, so they cannot be compared with the plan. B/parameter:
  of the peak.
- floor s: no step of the plan is shorter on this machine, as far as it was measured; floor is: what
  the floor is made of; x floor: s/step by it.
- wall s: everything, from the config to the last step.
- phases and breakdown: see docs/architecture.md, "Where a step's time goes". `forward` begins when
  the backward before it has ended, so it includes waiting for updates; `update` is the optimizer's
  own time, beside it."""


def speeds(results: "Sequence[Result]") -> str:
    """Markdown, a row a run: speed, memory, how far from the floor; or why not."""
    head = f"| shape | run | {' | '.join(SPEEDS)} |"
    return "\n".join([head, "|---" * (len(SPEEDS) + 2) + "|", *map(_speeds_row, results)])


def _speeds_row(result: "Result") -> str:
    start, f = f"| {result.shape} | {result.variant} |", result.figures
    if f is None:
        return f"{start} {result.reason} " + "|" * len(SPEEDS)
    planned = "not measured" if f.planned_seconds is None else f"{f.planned_seconds:.3f}"
    cells = [f"{f.seconds:.3f}", planned, f"{f.tokens_per_second:.0f}", f"{f.tflops:.3g}"]
    cells += [str(f.kept_layers), _share(f.link_in_use), _share(f.link_out_use)]
    cells += [_gib(f.gpu_peak_bytes), _gib(f.gpu_planned_bytes)]
    host = [_gib(f.host_peak_bytes), _gib(f.host_step_bytes)]
    cells += host if f.first else [f"({cell})" for cell in host]
    cells += [_gib(f.host_planned_bytes), f"{f.bytes_per_parameter:.2f}"]
    if f.floor_seconds is None or f.floor_part is None:
        cells += ["not measured", "", ""]
    else:
        cells += [f"{f.floor_seconds:.3f}", f"{f.seconds / f.floor_seconds:.2f}", f.floor_part]
    return f"{start} {' | '.join(cells)} | {f.wall_seconds:.0f} |"


def _share(share: float | None) -> str:
    return "not measured" if share is None else f"{share:.0%}"


def breakdowns(results: "Sequence[Result]") -> str:
    """Markdown, a column a run: where the time of a step went."""
    measured = [r for r in results if r.figures is not None]
    columns = [f.phases | f.breakdown for r in measured if (f := r.figures) is not None]
    names = list(dict.fromkeys(name for column in columns for name in column))
    lines = [
        f"| a step | {' | '.join(f'{r.shape} {r.variant}' for r in measured)} |",
        "|---" * (len(measured) + 1) + "|",
    ]
    for name in names:
        cells = [f"{column[name]:.4g}" if name in column else "" for column in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f}"


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, run, print tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shapes", nargs="+", type=parse_shape, metavar="SHAPE[:LAYERS]")
    parser.add_argument("--batch", nargs="+", type=parse_batch, default=[Batch(8, 1024)])
    parser.add_argument("--accumulation", nargs="+", type=int, default=[1])
    parser.add_argument("--packed", type=int, metavar="TOKENS", help="documents of about so many")
    parser.add_argument(
        "--steps", type=int, default=6, help="the first two are not timed, if there are more"
    )
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE")
    parser.add_argument(
        "--variant",
        nargs="+",
        action="append",
        metavar="KEY=VALUE",
        help="one run more, with these",
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--verbose", action="store_true", help="show plans and steps")
    args = parser.parse_args(argv)

    from scripts.bench_run import Variant, bench  # torch: not for --help

    if args.steps < 1:
        parser.error(f"--steps: wanted at least 1, got {args.steps}")
    if args.packed is not None and args.packed < 1:
        parser.error(f"--packed: wanted at least 1, got {args.packed}")
    variants = [
        Variant(batch, accumulation, args.packed, (*args.set, *overrides))
        for overrides, batch, accumulation in itertools.product(
            args.variant or [[]], args.batch, args.accumulation
        )
    ]
    for v in variants:
        if v.accumulation < 1 or v.batch.rows % v.accumulation:
            parser.error(f"--accumulation: {v.accumulation} does not divide the rows of {v.batch}")
    results: list[Result] = []
    for shape in args.shapes:
        for result in bench(shape, variants, args.steps, first=not results, verbose=args.verbose):
            results.append(result)
            print(speeds([result]).splitlines()[-1], file=sys.stderr, flush=True)
    if args.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
        return
    print(speeds(results), breakdowns(results), LEGEND, sep="\n\n")


if __name__ == "__main__":
    # Read when torch loads OpenMP; `megatrain train` does so beside a GPU.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    main()
