"""What a save costs a run that goes on, and how soon a run goes on from what was saved.

    python scripts/bench_checkpoint.py 7b:4 7b:12 --batch 8x1024 --pool 0 auto

A shape is trained on random tokens with the program's own loop, and saved once with each `--pool`
while it goes on. From the last checkpoint it is then resumed in new processes: lazily, as `resume`
does it, and with everything loaded before the first step. There is one checkpoint on the disk at a
time, and none is left. Each part has a process of its own, so that the memory of one is gone before
the next begins. Nothing is downloaded.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.shapes import Batch, Shape, parse_batch, parse_shape

# What a part measured; the keys are the attributes of `Saves` or `ResumeFigures`.
Figures = Mapping[str, Any]
Measure = Callable[[Mapping[str, object]], Figures]

LEGEND = """\
- before, beside, longest, after: seconds of a step before the save, while it was written (median,
  and the longest), and after it. stall: seconds for which updates were kept waiting by it.
- extra host: peak resident set during the save, less what was resident before; allowed: its pool,
  and one chunk a thread. page cache: by how much that grew at most.
- Of a resume, all seconds count from the start of the loader: until the first decoder layer's
  forward began (first compute), until the first step's loss was known (first loss), until all
  was there and verified (loaded). read, least: bytes read until the first compute, and the weights
  without which it cannot begin. ready: from the start of the process to that of the loader.
- same loss: the losses of the first steps are, bit for bit, those of the run that went on."""

SAVES = (
    *("pool", "before s", "beside s", "longest s", "after s", "steps", "stall s", "save s", "GB"),
    *("GB/s", "mode", "extra host MiB", "allowed MiB", "page cache MiB"),
)
RESUMES = (
    *("how", "first compute s", "read GB", "least GB", "first loss s", "loaded s", "GB", "GB/s"),
    *("page cache MiB", "ready s", "same loss"),
)


@dataclass(frozen=True)
class Result:
    """A shape: what its saves and resumes measured, and why there is nothing more."""

    shape: str
    saves: Figures | None
    resumes: tuple[Figures, ...]
    reason: str = ""


class PartFailed(Exception):  # noqa: N818  told in the table
    """A process has measured nothing."""


def measure_part(job: Mapping[str, object]) -> Figures:
    """In this process: what `part` of the job says."""
    from scripts.checkpoint_parts import Job
    from scripts.checkpoint_resumes import measure_resume
    from scripts.checkpoint_saves import measure_saves

    asked = dict(job)
    part, checkpoint = str(asked.pop("part")), str(asked.pop("checkpoint"))
    for name in ("pools", "overrides"):
        asked[name] = tuple(asked[name])  # type: ignore[arg-type]  # lists, as JSON has them
    typed = Job(**asked)  # type: ignore[arg-type]  # by name
    if part == "saves":
        return asdict(measure_saves(typed))
    return asdict(measure_resume(typed, Path(checkpoint), eager=part == "eager"))


def measure_apart(job: Mapping[str, object]) -> Figures:
    """In a process of its own.

    Raises:
        PartFailed: It ended without figures; what it said is on stderr.
    """
    out = Path(str(job["folder"])) / "figures.json"
    out.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--job", json.dumps(job), "--out", str(out)]
    # As `megatrain train` sets it beside a GPU; read when torch loads OpenMP.
    process = subprocess.Popen(command, env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"})
    try:
        # If memory ends, the kernel ends this one and not its parent.
        Path(f"/proc/{process.pid}/oom_score_adj").write_text("1000")
        code = process.wait()
    finally:
        process.kill()
        process.wait()
    if code or not out.exists():
        raise PartFailed(f"{job['part']}: the process ended with {code}")
    figures: Figures = json.loads(out.read_text())
    return figures


def bench(shape: Shape, job: Mapping[str, object], ways: Sequence[str], measure: Measure) -> Result:
    """Save, then resume in each way."""
    saves: Figures | None = None
    resumes: list[Figures] = []
    reason = ""
    try:
        saves = measure({**job, "part": "saves", "checkpoint": ""})
        print(*_save_rows(shape.name, saves), sep="\n", file=sys.stderr, flush=True)
        for way in ways:
            found = measure({**job, "part": way, "checkpoint": saves["checkpoint"]})
            resumes.append({**found, "wanted": list(saves["losses"][: len(found["losses"])])})
            print(_resume_row(shape.name, resumes[-1]), file=sys.stderr, flush=True)
    except PartFailed as error:
        reason = str(error)
    return Result(shape.name, saves, tuple(resumes), reason)


def tables(results: Sequence[Result]) -> str:
    """Markdown: a row a save, a row a resume, and the losses."""
    saves, resumes, notes = [], [], []
    for result in results:
        if result.saves is not None:
            saves += _save_rows(result.shape, result.saves)
        resumes += [_resume_row(result.shape, figures) for figures in result.resumes]
        notes += _notes(result)
    parts = [_table(SAVES, saves)]
    if resumes:
        parts.append(_table(RESUMES, resumes))
    return "\n\n".join([*parts, "\n".join(notes), LEGEND])


def _table(columns: Sequence[str], rows: Sequence[str]) -> str:
    return "\n".join(
        [f"| shape | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|", *rows]
    )


def _notes(result: Result) -> list[str]:
    lines = [f"- {result.shape}: {result.reason}."] if result.reason else []
    first = {bool(one["eager"]): float(one["first_seconds"]) for one in result.resumes}
    if len(first) == 2:
        lines.append(
            f"- {result.shape}: the first layer computes {first[True] / first[False]:.1f} times as "
            "early as with everything loaded before."
        )
    for one in result.resumes:
        pairs = zip(one["losses"], one["wanted"], strict=True)
        how = "eager" if one["eager"] else "lazy"
        losses = ", ".join(f"{now} ({'=' if now == then else 'not'} {then})" for now, then in pairs)
        lines.append(f"- {result.shape}, {how}: losses {losses}.")
    return lines


def _save_rows(shape: str, saves: Figures) -> list[str]:
    rows = []
    for f in saves["figures"]:
        cells = [_mib(f["pool_bytes"])]
        cells += [f"{f[f'seconds_{when}']:.3f}" for when in ("before", "during")]
        cells += [f"{f['longest_during']:.3f}", f"{f['seconds_after']:.3f}"]
        cells += [str(f["steps_during"]), f"{f['stall_seconds']:.3f}", *_moved(f, "seconds")]
        cells += [f["mode"], _mib(f["extra_host_bytes"]), _mib(f["allowed_host_bytes"])]
        rows.append(f"| {shape} | {' | '.join([*cells, _mib(f['page_cache_bytes'])])} |")
    return rows


def _resume_row(shape: str, f: Figures) -> str:
    cells = ["eager" if f["eager"] else "lazy", f"{f['first_seconds']:.3f}"]
    cells += [f"{f[name] / 1e9:.3f}" for name in ("first_bytes", "least_bytes")]
    cells += [f"{f['step_seconds']:.3f}", *_moved(f, "loaded_seconds")]
    same = "yes" if f["losses"] == f["wanted"] else "NO"
    cells += [_mib(f["page_cache_bytes"]), f"{f['ready_seconds']:.1f}", same]
    return f"| {shape} | {' | '.join(cells)} |"


def _moved(f: Figures, seconds: str) -> list[str]:
    """Seconds, GB, and GB a second."""
    taken, gb = f[seconds], f["num_bytes"] / 1e9
    return [f"{taken:.2f}", f"{gb:.2f}", f"{gb / taken:.2f}"]


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f}"


def _pool(text: str) -> str:
    if text != "auto" and not text.isdecimal():
        raise argparse.ArgumentTypeError("wanted `auto` or bytes")
    return text


def main(argv: Sequence[str] | None = None, measure: Measure = measure_apart) -> None:
    """Parse, measure each shape, print tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shapes", nargs="*", type=parse_shape, metavar="SHAPE[:LAYERS]")
    parser.add_argument("--batch", type=parse_batch, default=Batch(8, 1024))
    parser.add_argument("--folder", help="on the disk to measure; else the system's temporary one")
    parser.add_argument("--pool", nargs="+", type=_pool, default=["auto"], metavar="BYTES|auto")
    parser.add_argument("--save-at", type=int, default=6, help="steps before the first save")
    parser.add_argument("--steps", type=int, default=12, help="with as many after each as are left")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE")
    parser.add_argument("--no-resume", action="store_true")
    parser.add_argument("--no-eager", action="store_true", help="resume lazily alone")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--verbose", action="store_true", help="show plans and steps")
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.job is not None:
        args.out.write_text(json.dumps(measure_part(args.job)))
        return
    if not args.shapes:
        parser.error("wanted a shape")
    if args.save_at < 3:
        parser.error(f"--save-at: the first two steps are not timed; wanted 3, got {args.save_at}")
    if args.steps < args.save_at + 2:
        parser.error(f"--steps: wanted {args.save_at + 2} or more, got {args.steps}")
    ways = [] if args.no_resume else ["lazy"] if args.no_eager else ["lazy", "eager"]
    results = []
    for shape in args.shapes:
        with tempfile.TemporaryDirectory(prefix="megatrain-bench-", dir=args.folder) as folder:
            job = {
                "shape": shape.name,
                "batch": str(args.batch),
                "folder": folder,
                "pools": args.pool,
                "save_at": args.save_at,
                "after": args.steps - args.save_at,
                "overrides": args.set,
                "verbose": args.verbose,
            }
            results.append(bench(shape, job, ways, measure))
    if args.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
        return
    print(tables(results))


if __name__ == "__main__":
    main()
