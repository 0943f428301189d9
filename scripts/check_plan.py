"""Plans held against runs: peak bytes within 5 % and never 2 % under, steps within 15 %.

    python scripts/check_plan.py
    python scripts/check_plan.py --device cuda --shapes 0.5b 3b 7b
    python scripts/check_plan.py --only "bf16" --json

Each case is `megatrain plan CONFIG --json` in a process of its own and then the run itself in
another, from a config file to its last checkpoint; a case `resume` measures a third process that
goes on from it. Weights are random, rows are random tokens, nothing is downloaded. Host bytes are
what the system counted for the process when it had ended, GPU bytes what torch and the driver had
in use at most. Seconds are the median step without the first, against a plan with the rates that
`megatrain probe` measures at the beginning; without `--seconds` none are looked at: on a machine
where others compute too they mean nothing. Seconds of a save are the median of the process's own,
told and not judged: disks differ from themselves by more. Exit code 1 if a case is out of bounds.
"""

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.plan_cases import CPU_CASES, Case, gpu_cases
from scripts.shapes import parse_shape, write_model

OVER, UNDER, SECONDS = 0.05, 0.02, 0.15
# Of the tokenizer, of bytes and an end of text; the model has more.
_TOKENS = 257

# Runs the program, and writes its peaks down when it ends. What `wait4` tells of a process begins
# with the peak of the one that started it.
_CHILD = """
import atexit, pathlib, sys
where = sys.argv.pop()
def note():
    if "torch" not in sys.modules:
        return
    from megatrain_cli.probe.peaks import gpu_peak_bytes, host_peak_bytes
    pathlib.Path(where).write_text(f"{host_peak_bytes()} {gpu_peak_bytes()}")
atexit.register(note)
from megatrain_cli.cli.app import main
main()
"""


@dataclass(frozen=True)
class Outcome:
    """What was planned and what was measured; None where nobody knows."""

    case: str
    parameters: int
    host_planned: int
    host_measured: int
    gpu_planned: int
    gpu_measured: int
    step_planned: float | None
    step_measured: float
    save_planned: float | None
    save_measured: float | None
    in_bounds: bool


def save_tokenizer(folder: Path) -> None:
    """Of bytes: rows bring their tokens, and only its end of text is used."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab["<end>"] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>"
    ).save_pretrained(folder)


def write_case(folder: Path, case: Case, device: str, steps: int) -> Path:
    """Model, rows and config."""
    import yaml

    write_model(folder / "model", case.shape)
    save_tokenizer(folder / "model")
    draw = random.Random(0)
    count = case.rows * case.accumulation * steps
    with (folder / "rows.jsonl").open("w") as file:
        for i in range(count):
            size = case.longest if i % 8 == 0 else draw.randint(case.longest // 2, case.longest)
            ids = [draw.randrange(_TOKENS) for _ in range(size)]
            file.write(json.dumps({"input_ids": ids, "labels": ids}) + "\n")
    values: dict[str, dict[str, Any]] = {
        "model": {"path": "model", "init": "random"},
        "data": {"train": "rows.jsonl", "format": "tokenized", "max_length": case.longest},
        "train": {
            "output_dir": "run",
            "max_steps": steps,
            "micro_batch_size": case.rows,
            "gradient_accumulation_steps": case.accumulation,
        },
        "pipeline": {"device": device},
        "logging": {"tensorboard": False},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path


def run_case(
    case: Case, device: str, environment: dict[str, str], *, steps: int, seconds: bool
) -> Outcome:
    """Plan and run one case.

    Raises:
        RuntimeError: The program failed; with what it said.
    """
    with tempfile.TemporaryDirectory(prefix="megatrain-check-") as name:
        folder = Path(name)
        words = [str(write_case(folder, case, device, steps)), *case.overrides]
        planned = json.loads(_run(["plan", *words, "--json"], folder, environment).stdout)
        run = folder / "run"
        if case.resumes:
            _run(["train", *words, "train.max_steps=1"], folder, environment)
            goes_on = ["resume", str(run), f"train.max_steps={steps}"]
            ran = _run(goes_on, folder, environment, "peaks")
        else:
            ran = _run(["train", *words], folder, environment, "peaks")
        lines = (run / "metrics.jsonl").read_text().splitlines()
        took = [record["seconds"] for line in lines if "grad_norm" in (record := json.loads(line))]
        # The first step of a process warms up; a resumed one waits for what is loaded, too.
        timed = took[2:] if case.resumes else took[1:]
        host, gpu = map(int, (folder / "peaks").read_text().split())
    step, expected = statistics.median(timed), planned["step_seconds"] if seconds else None
    if expected is not None and case.saves:
        expected = None if gpu else expected + planned["stall_seconds"]
    saves = [float(found) for found in re.findall(_SAVED, ran.stderr)]
    good = _near(planned["host_peak_bytes"], host)
    if gpu:
        good = good and _near(planned["gpu_peak_bytes"], gpu)
    if expected is not None:
        good = good and abs(expected / step - 1) <= SECONDS
    return Outcome(
        case.name,
        case.shape.parameters,
        planned["host_peak_bytes"],
        host,
        planned["gpu_peak_bytes"],
        gpu,
        expected,
        step,
        planned["save_seconds"] if seconds else None,
        statistics.median(saves) if saves else None,
        good,
    )


def _near(planned: int, measured: int) -> bool:
    return -UNDER <= planned / measured - 1 <= OVER


# How the program tells of a checkpoint; the group is its seconds.
_SAVED = r"saved .*? in ([0-9.]+) s,"


def _run(
    words: list[str], folder: Path, environment: dict[str, str], note: str | None = None
) -> subprocess.CompletedProcess[str]:
    """The program, once it has ended well."""
    command = [sys.executable, "-c", _CHILD, *words, str(folder / (note or "ignored"))]
    ran = subprocess.run(
        command, check=False, cwd=folder, env=environment, capture_output=True, text=True
    )
    if ran.returncode:
        raise RuntimeError(f"{words[0]} failed: {ran.stderr[-2000:]}")
    return ran


def table(outcomes: Sequence[Outcome]) -> str:
    """Markdown, a row a case."""
    plan = ", planned | off"
    lines = [
        f"| case | host MiB{plan} | GPU GiB{plan} | s/step{plan} | save s, planned | ok |",
        "|---" * 9 + "|",
    ]
    for o in outcomes:
        gpu, gpu_off, step, step_off = "", "", f"{o.step_measured:.3g}, not planned", ""
        if o.gpu_measured:
            gpu = f"{o.gpu_measured / 2**30:.1f}, {o.gpu_planned / 2**30:.1f}"
            gpu_off = f"{o.gpu_planned / o.gpu_measured - 1:+.1%}"
        if o.step_planned is not None:
            step = f"{o.step_measured:.3g}, {o.step_planned:.3g}"
            step_off = f"{o.step_planned / o.step_measured - 1:+.1%}"
        host = f"{o.host_measured / 2**20:.0f}, {o.host_planned / 2**20:.0f}"
        off = f"{o.host_planned / o.host_measured - 1:+.1%}"
        saved = "" if o.save_measured is None else f"{o.save_measured:.1f}"
        if o.save_measured is not None and o.save_planned is not None:
            saved += f", {o.save_planned:.1f}"
        holds = "yes" if o.in_bounds else "**no**"
        cells = [o.case, host, off, gpu, gpu_off, step, step_off, saved, holds]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, run, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--shapes", nargs="+", type=parse_shape, metavar="SHAPE[:LAYERS]")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="cases with such a name")
    parser.add_argument("--seconds", action="store_true", help="probe, and look at steps too")
    parser.add_argument(
        "--steps", type=int, default=8, help="of each run, at least 4, as the first are not timed"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    if args.steps < 4:
        parser.error(f"--steps: wanted at least 4, got {args.steps}")
    cases: tuple[Case, ...] = CPU_CASES
    if args.device == "cuda":
        shapes = args.shapes or [parse_shape(name) for name in ("0.5b", "3b", "7b")]
        cases = gpu_cases(shapes)
    elif args.shapes:
        parser.error("--shapes are for --device cuda: the CPU has cases of its own")
    if args.only:
        cases = tuple(c for c in cases if any(text in c.name for text in args.only))
    if not cases:
        parser.error("--only: no case has a name like that")
    root = str(Path(__file__).resolve().parent.parent)
    with tempfile.TemporaryDirectory(prefix="megatrain-check-home-") as home:
        # No rates but those measured here.
        environment = {**os.environ, "XDG_CONFIG_HOME": home, "HF_HUB_OFFLINE": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(
            [root, *filter(None, [environment.get("PYTHONPATH")])]
        )
        if args.seconds:
            ran = _run(["probe", "--device", args.device], Path(home), environment)
            print(ran.stdout, ran.stderr, sep="", file=sys.stderr, flush=True)
        outcomes = []
        for case in cases:
            found = run_case(case, args.device, environment, steps=args.steps, seconds=args.seconds)
            outcomes.append(found)
            print(table([found]).splitlines()[-1], file=sys.stderr, flush=True)
    print(json.dumps([asdict(o) for o in outcomes], indent=2) if args.json else table(outcomes))
    raise SystemExit(0 if all(o.in_bounds for o in outcomes) else 1)


if __name__ == "__main__":
    main()
