"""A folder with a tiny model, a tokenizer, rows and a config, and a run started from it."""

import hashlib
import io
import json
import random
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from megatrain_cli.config.load import LoadedConfig, load_config
from megatrain_cli.plan.plan import RunPlan
from megatrain_cli.report.console import RunConsole
from megatrain_cli.report.records import StepRecord
from megatrain_cli.store.master import LayerTile, MasterStore
from megatrain_cli.train.assemble import Engine, assemble, build_executor, prepare
from megatrain_cli.train.loop import Run
from megatrain_cli.train.rows import TrainingRows, load_rows
from megatrain_cli.train.warm_up import warm_up
from tests.families import make_tiny

# ChatML, without the marks that say which tokens the assistant made, as nearly all models have it.
_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_WORDS = ("red", "green", "blue", "one", "two", "sun", "moon", "star", "sea", "tree")


def save_tokenizer(folder: Path) -> None:
    """Bytes and two marks; the mark that ends a turn also pads."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {"<|im_start|>": 256, "<|im_end|>": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = _TEMPLATE
    fast.save_pretrained(folder)


def make_rows(count: int) -> list[dict[str, object]]:
    """Chats of very different lengths, all below 64 tokens."""
    draw = random.Random(0)

    def words(most: int) -> str:
        return " ".join(draw.choices(_WORDS, k=draw.randint(1, most)))

    return [
        {
            "messages": [
                {"role": "user", "content": words(3)},
                {"role": "assistant", "content": words(4)},
            ]
        }
        for _ in range(count)
    ]


def make_workspace(
    folder: Path,
    kind: str = "llama",
    *,
    tied: bool = False,
    rows: int = 12,
    model: dict[str, Any] | None = None,
    **sections: Mapping[str, object],
) -> Path:
    """Write everything a run needs and return its config file.

    Args:
        folder: Where to; exists.
        kind: Family of the model, see `tests.families`.
        tied: Whether its embeddings are tied.
        rows: How many rows of data.
        model: Other arguments of `make_tiny`.
        sections: Values laid over the config below, section by section.
    """
    options = {"layers": 3, "hidden": 16} | (model or {})
    # Five times the usual: at this width attention would look nowhere in particular otherwise.
    options.setdefault("initializer_range", 0.1)
    make_tiny(kind, tied=tied, **options).save_pretrained(folder / "model")
    save_tokenizer(folder / "model")
    lines = (json.dumps(row) + "\n" for row in make_rows(rows))
    (folder / "train.jsonl").write_text("".join(lines))
    config: dict[str, dict[str, object]] = {
        "model": {"path": "model", "dtype": "float32"},
        "data": {"train": "train.jsonl", "max_length": 64, "shuffle": False},
        "train": {"output_dir": "run", "max_steps": 3, "micro_batch_size": 4, "seed": 1},
        "optimizer": {"learning_rate": 1e-3, "master": "fp32", "threads": 1},
        "schedule": {"type": "constant"},
        "pipeline": {"device": "cpu"},
    }
    for section, values in sections.items():
        config.setdefault(section, {}).update(values)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@dataclass
class Started:
    """A run whose engine stands."""

    loaded: LoadedConfig
    engine: Engine
    rows: TrainingRows

    def steps(self) -> Iterator[StepRecord]:
        """From the first step; the store keeps what earlier calls made of it."""
        return Run(self.loaded, self.engine, self.rows).steps()

    def by_name(self, read: Callable[[LayerTile], torch.Tensor | None]) -> dict[str, torch.Tensor]:
        """A copy of one part of all tiles, cut into parameters."""
        found = {}
        for tile in self.engine.store.tiles:
            flat = read(tile)
            assert flat is not None
            for entry in tile.layout.entries:
                cut = flat[entry.offset : entry.end].clone()
                found[entry.param.name] = cut.view(entry.param.shape)
        return found


@contextmanager
def one_thread() -> Iterator[None]:
    """On tensors this small, torch's threads wait for each other far longer than they work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def start(
    config: Path,
    overrides: Sequence[str] = (),
    *,
    adjust: Callable[[RunPlan], RunPlan] = lambda plan: plan,
    poison: bool = False,
) -> Iterator[Started]:
    """Build a run as `train` does, up to its first step.

    Args:
        config: The config file.
        overrides: As on the command line.
        adjust: Changes the plan, before rows are cut and before anything is allocated.
        poison: Fill staging buffers with NaN as soon as they are given back.
    """
    loaded = load_config(config, overrides)
    skeleton, plan = prepare(loaded)
    rows = load_rows(loaded.config, adjust(plan).decisions)
    console = RunConsole(Console(file=io.StringIO()))
    plan, functions = warm_up(loaded.config, skeleton, plan, rows.longest, console)
    plan = adjust(plan)  # it was made anew
    rows = rows.planned(plan.decisions)
    engine = assemble(loaded, skeleton, plan, functions, console)
    if poison:
        engine.executor.close()
        engine.executor = build_executor(
            skeleton, plan, engine.store, engine.lanes, functions, poison=True
        )
    try:
        with one_thread():
            yield Started(loaded, engine, rows)
    finally:
        engine.close()


def digest(store: MasterStore) -> str:
    """All bits that outlive a step."""
    found = hashlib.blake2b(digest_size=16)
    for tile in store.tiles:
        for part in (tile.weights, tile.remainder, tile.master, tile.exp_avg, tile.exp_avg_sq):
            if part is not None:
                found.update(part.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def run_digest(
    config: Path,
    overrides: Sequence[str] = (),
    *,
    adjust: Callable[[RunPlan], RunPlan] = lambda plan: plan,
    poison: bool = False,
) -> tuple[tuple[str, ...], str]:
    """Loss and norm of every step, and the final state, all to the last bit."""
    with start(config, overrides, adjust=adjust, poison=poison) as run:
        numbers = tuple(struct.pack("dd", r.loss, r.grad_norm).hex() for r in run.steps())
        return numbers, digest(run.engine.store)


def load_whole(folder: Path) -> dict[str, torch.Tensor]:
    """All parameters of a folder as Hugging Face loads it: none missing, left over or changed."""
    load: Any = AutoModelForCausalLM.from_pretrained  # its types know nothing of the second result
    model, info = load(folder, dtype="auto", output_loading_info=True)
    assert not any(info.values()), info
    return {name: param.detach() for name, param in model.named_parameters()}
