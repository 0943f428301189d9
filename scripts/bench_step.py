"""Seconds a step, tokens a second and TFLOPS of `megatrain train` at real model shapes.

    python scripts/bench_step.py 3b 7b --rows 8 --length 1024 [--set pipeline.staging_buffers=3]

Weights are random and rows are made up, so nothing has to be downloaded; the run itself is the
command that users run, in a process of its own. TFLOPS counts 6 x parameters x tokens, so work
that is done twice (recompute) counts once. The first steps are left out of the medians.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

WARM_UP_STEPS = 2


@dataclass(frozen=True)
class Shape:
    """A model as its config.json tells it."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool
    kind: str = "qwen2"

    @property
    def parameters(self) -> int:
        """All parameters; tied ones once."""
        head_dim = self.hidden // self.heads
        qkv = self.hidden * head_dim * (self.heads + 2 * self.kv_heads)
        bias = head_dim * (self.heads + 2 * self.kv_heads) if self.kind == "qwen2" else 0
        layer = qkv + bias + self.hidden**2 + 3 * self.hidden * self.intermediate + 2 * self.hidden
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * layer + embeddings + self.hidden


SHAPES = {
    "0.5b": Shape(896, 24, 4864, 14, 2, 151936, tied=True),
    "1.5b": Shape(1536, 28, 8960, 12, 2, 151936, tied=True),
    "3b": Shape(2048, 36, 11008, 16, 2, 151936, tied=True),
    "7b": Shape(3584, 28, 18944, 28, 4, 152064, tied=False),
    "14b": Shape(5120, 48, 13824, 40, 8, 152064, tied=False),
    "llama-8b": Shape(4096, 32, 14336, 32, 8, 128256, tied=False, kind="llama"),
}


@dataclass(frozen=True)
class Result:
    """What one shape measured; medians over the timed steps, memory as the largest so far."""

    shape: str
    parameters: int
    rows: int
    length: int
    first_loss: float
    seconds: float
    tokens_per_second: float
    tflops: float
    phases: dict[str, float]
    host_peak_bytes: int
    wall_seconds: float


def write_model(folder: Path, shape: Shape) -> None:
    """A folder with config.json and a byte-level tokenizer; no weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, PreTrainedTokenizerFast, Qwen2Config

    make = Qwen2Config if shape.kind == "qwen2" else LlamaConfig
    config = make(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=131072,
        tie_word_embeddings=shape.tied,
    )
    config.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<eos>": 0, **{character: i + 1 for i, character in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    fast.save_pretrained(folder)


def write_rows(path: Path, count: int, length: int) -> None:
    """Rows of exactly `length` tokens once cut: all text, all of it learned."""
    words = ["the", "model", "does", "not", "fit", "so", "its", "layers", "come", "and", "go"]
    with path.open("w", encoding="utf-8") as file:
        for row in range(count):
            turned = words[row % len(words) :] + words[: row % len(words)]
            text = " ".join(turned) + " "
            file.write(json.dumps({"text": text * (length // len(text) + 2)}) + "\n")


def bench(name: str, args: argparse.Namespace) -> Result:
    """Train one shape for a few steps and sum up its journal."""
    shape = SHAPES[name]
    with tempfile.TemporaryDirectory(prefix="megatrain-bench-") as place:
        folder = Path(place)
        write_model(folder / "model", shape)
        write_rows(folder / "rows.jsonl", 64, args.length)
        config = {
            "model": {"path": "model", "init": "random"},
            "data": {"train": "rows.jsonl", "format": "text", "max_length": args.length},
            "train": {
                "output_dir": "run",
                "max_steps": args.steps,
                "micro_batch_size": args.rows,
                "gradient_accumulation_steps": args.accumulation,
            },
        }
        (folder / "config.yaml").write_text(json.dumps(config))
        command = [sys.executable, "-m", "megatrain_cli", "train", str(folder / "config.yaml")]
        began = time.perf_counter()
        root = str(Path(__file__).resolve().parent.parent)
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        done = subprocess.run(
            [*command, *args.set],
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"},
            stderr=None if args.verbose else subprocess.PIPE,
            text=True,
        )
        wall = time.perf_counter() - began
        if done.returncode:
            sys.exit(f"{name}: exit {done.returncode}\n{done.stderr or ''}")
        lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    timed = steps[WARM_UP_STEPS:]
    seconds = statistics.median(step["seconds"] for step in timed)
    tokens = args.rows * args.accumulation * args.length
    return Result(
        shape=name,
        parameters=shape.parameters,
        rows=args.rows * args.accumulation,
        length=args.length,
        first_loss=steps[0]["loss"],
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        tflops=6 * shape.parameters * tokens / seconds / 1e12,
        phases={
            key: statistics.median(step["phases"][key] for step in timed)
            for key in timed[0]["phases"]
        },
        host_peak_bytes=resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
        wall_seconds=wall,
    )


def main() -> None:
    """Parse, run, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shapes", nargs="+", choices=sorted(SHAPES))
    parser.add_argument("--rows", type=int, default=8, help="rows of a micro-batch")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--set", nargs="*", default=[], help="config overrides, key=value")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--verbose", action="store_true", help="show what the run says")
    args = parser.parse_args()
    results = [bench(name, args) for name in args.shapes]
    if args.json:
        print(json.dumps([asdict(r) for r in results], indent=2))
        return
    print(
        "| shape | batch x length | first loss | s/step | tokens/s | TFLOPS | phases | host peak |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for r in results:
        phases = ", ".join(f"{key} {value:.3f}" for key, value in r.phases.items())
        print(
            f"| {r.shape} | {r.rows} x {r.length} | {r.first_loss:.3f} | {r.seconds:.3f} "
            f"| {r.tokens_per_second:.0f} | {r.tflops:.0f} | {phases} "
            f"| {r.host_peak_bytes / 2**30:.1f} GiB |"
        )


if __name__ == "__main__":
    main()
