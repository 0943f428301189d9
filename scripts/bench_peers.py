"""The same training work with what a user would pick instead: one table of ratios.

    python scripts/bench_peers.py 3b --batch 8x1024 32x1024

Every peer trains the same shape on the same random tokens: BF16 compute, `sdpa`, gradients clipped
to 1.0, activation checkpointing where it is not megatrain. Each runs in a process of its own, which
may fail or be ended: the table then says why. TFLOPS counts 6 x parameters x tokens. The first
steps are left out of the medians.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.shapes import Batch, Shape, make_tokens, parse_batch, parse_shape, tflops

WARM_UP_STEPS = 2
OURS = "megatrain"
COLUMNS = (
    *("shape", "batch x length", "with", "first loss", "s/step", "TFLOPS", "megatrain is"),
    *("GPU peak GiB", "host RSS GiB", "machine GiB"),
)
NAMES = (OURS, "resident", "resident-fp32", "fsdp2", "deepspeed")


@dataclass(frozen=True)
class Figures:
    """What one peer measured at one batch.

    Attributes:
        first_loss: Of random weights: near the others', or it is other work.
        seconds: Median of the timed steps.
        host_peak_bytes: The largest resident set.
        machine_bytes: Memory of the whole machine that was taken since the process began, read
            after steps: with pinned memory that belongs to the driver.
    """

    first_loss: float
    seconds: float
    gpu_peak_bytes: int
    host_peak_bytes: int
    machine_bytes: int


@dataclass(frozen=True)
class Result:
    """One cell of the comparison: figures, or the reason why there are none."""

    peer: str
    shape: str
    batch: str
    tflops: float | None
    figures: Figures | None
    reason: str = ""


def measure_peer(name: str, shape: Shape, batches: list[Batch], steps: int, out: Path) -> None:
    """In the peer's own process: train, and append one line of figures a batch to `out`."""
    import torch

    from megatrain_cli.probe.peaks import gpu_peak_bytes
    from scripts.peaks import forget_peaks, host_peak_bytes, machine_bytes
    from scripts.peers import PEERS

    before = machine_bytes()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    step = PEERS[name](shape, device)
    for batch in batches:
        forget_peaks()
        losses, seconds, taken = [], [], 0
        for index in range(steps):
            tokens = torch.from_numpy(make_tokens(shape, batch, index)).to(device)
            began = time.perf_counter()
            loss = step(tokens)
            if on_gpu:
                torch.cuda.current_stream().synchronize()
            seconds.append(time.perf_counter() - began)
            losses.append(float(loss))
            taken = max(taken, machine_bytes() - before)
        timed = statistics.median(seconds[WARM_UP_STEPS:])
        figures = Figures(losses[0], timed, gpu_peak_bytes(), host_peak_bytes(), taken)
        _append(out, figures)


def measure_ours(shape: Shape, batches: list[Batch], steps: int, out: Path) -> None:
    """The same for megatrain, as `bench_step.py` runs it."""
    from scripts.bench_run import Variant, bench
    from scripts.peaks import machine_bytes

    before = machine_bytes()
    for result in bench(shape, [Variant(batch) for batch in batches], steps):
        if result.figures is None:
            sys.exit(result.reason)
        f = result.figures
        taken = machine_bytes() - before  # the store is as large as ever between two runs
        _append(out, Figures(f.first_loss, f.seconds, f.gpu_peak_bytes, f.host_peak_bytes, taken))


def _append(out: Path, figures: Figures) -> None:
    with out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(figures)) + "\n")


def run_peer(
    name: str, shape: Shape, batches: list[Batch], steps: int, limit: float, *, verbose: bool
) -> list[Result]:
    """One peer in a process of its own; what it could not do has a reason."""
    with tempfile.TemporaryDirectory(prefix="megatrain-bench-") as folder:
        out, said = Path(folder, "figures.jsonl"), Path(folder, "said")
        out.touch()
        command = [sys.executable, __file__, shape.name, "--peers", name, "--child", str(out)]
        command += ["--steps", str(steps), "--batch", *map(str, batches)]
        with said.open("w") as file:
            process = subprocess.Popen(
                command,
                # As `bench_step.py` sets it for megatrain; the peers get what they would have.
                env=os.environ | ({"OMP_WAIT_POLICY": "PASSIVE"} if name == OURS else {}),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that it ends with all that it started
            )
            # If memory ends, the kernel ends this one and not its parent.
            Path(f"/proc/{process.pid}/oom_score_adj").write_text("1000")
            try:
                code: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        text = said.read_text(errors="replace")
        measured = [Figures(**json.loads(line)) for line in out.read_text().splitlines()]
    if verbose:
        print(text, file=sys.stderr)
    results = []
    for index, batch in enumerate(batches):
        done = measured[index] if index < len(measured) else None
        rate = tflops(shape, batch, done.seconds) if done else None
        reason = "" if done else why_not(code, text, limit)
        results.append(Result(name, shape.name, str(batch), rate, done, reason))
    return results


def why_not(code: int | None, said: str, limit: float) -> str:
    """Why a process has no figures, in one line.

    Args:
        code: Its exit status; None if it was ended at the limit.
        said: Its output.
        limit: Seconds that it had.
    """
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    last = lines[-1][:200] if lines else "it said nothing"
    if code is None:
        return f"timed out after {limit:.0f} s"
    if code == -signal.SIGKILL:
        return "out of host memory (killed)"
    if any("OutOfMemoryError" in line for line in lines):
        return "out of GPU memory"
    if any("CUDA error: out of memory" in line for line in lines):
        return "out of host memory (page-locking was refused)"
    if any("DefaultCPUAllocator" in line for line in lines):
        return "out of host memory (refused)"
    missing = [line for line in lines if line.startswith("ModuleNotFoundError")]
    if missing:
        return f"not installed ({missing[-1].partition(': ')[2]})"
    return f"failed with {code}: {last}"


def table(results: list[Result]) -> str:
    """Markdown; ratios are to megatrain at the same batch."""
    ours = {(r.shape, r.batch): r.tflops for r in results if r.peer == OURS}
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for r in results:
        start = f"| {r.shape} | {r.batch} | {r.peer} "
        if r.figures is None or r.tflops is None:
            lines.append(f"{start}| {r.reason} " + "|" * (len(COLUMNS) - 3))
            continue
        base = ours.get((r.shape, r.batch))
        ratio = f"{base / r.tflops:.2f} x as fast" if base else "-"
        f = r.figures
        memory = (f.gpu_peak_bytes, f.host_peak_bytes, f.machine_bytes)
        gib = " | ".join(f"{num_bytes / 2**30:.1f}" for num_bytes in memory)
        speed = f"{f.first_loss:.3f} | {f.seconds:.3f} | {r.tflops:.3g} | {ratio}"
        lines.append(f"{start}| {speed} | {gib} |")
    return "\n".join(lines)


def main() -> None:
    """Parse, run each peer, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shapes", nargs="+", type=parse_shape)
    parser.add_argument("--batch", nargs="+", type=parse_batch, default=[Batch(8, 1024)])
    parser.add_argument("--peers", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--steps", type=int, default=5, help=f"{WARM_UP_STEPS} are not timed")
    parser.add_argument("--limit", type=float, default=240, help="seconds a peer and shape")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--verbose", action="store_true", help="show what the peers say")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.steps <= WARM_UP_STEPS:
        parser.error(f"--steps: wanted more than {WARM_UP_STEPS}, got {args.steps}")
    if args.child is not None:
        [shape], [name] = args.shapes, args.peers
        if name == OURS:
            measure_ours(shape, args.batch, args.steps, args.child)
        else:
            measure_peer(name, shape, args.batch, args.steps, args.child)
        return
    results: list[Result] = []
    for shape in args.shapes:
        for name in args.peers:
            print(f"{shape.name}: {name} ...", file=sys.stderr, flush=True)
            results += run_peer(
                name, shape, args.batch, args.steps, args.limit, verbose=args.verbose
            )
    order = [(shape.name, str(batch)) for shape in args.shapes for batch in args.batch]
    results.sort(key=lambda r: order.index((r.shape, r.batch)))  # as they are compared
    print(json.dumps([asdict(r) for r in results], indent=2) if args.json else table(results))


if __name__ == "__main__":
    main()
