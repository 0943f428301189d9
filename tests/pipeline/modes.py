"""A small model in every mode of the pipeline, and what lanes without concurrency compute of it."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from megatrain_cli.pipeline.lanes import Lanes
from megatrain_cli.pipeline.ops import Op
from tests.engine import Later, Outcome, Settings, run, write_config

SHAPE: Settings = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
DIRECT: Mapping[str, object] = {"num_slabs": 0}
MODES: dict[str, tuple[Mapping[str, Settings], Mapping[str, object]]] = {
    "direct": ({}, DIRECT),
    "one slot": ({"pipeline": {"staging_buffers": 1}}, DIRECT),
    "two slabs": ({"pipeline": {"grad_slabs": 2}}, {}),
    "pieces": ({"pipeline": {"grad_slabs": 2}}, {"slab_numel": 512}),
    "kept": ({"pipeline": {"activations": {"keep_layers": 2}, "staging_buffers": 3}}, DIRECT),
    "offloaded": ({"pipeline": {"activations": {"keep_layers": 0, "offload": True}}}, DIRECT),
    "offloaded, many slots": (
        {"pipeline": {"activations": {"keep_layers": 0, "offload": True}, "staging_buffers": 5}},
        DIRECT,
    ),
    "eager": ({"optimizer": {"update": "eager", "max_grad_norm": None}}, {"slab_numel": 512}),
}


def write_configs(root: Path) -> dict[str, Path]:
    """The config file of each mode."""
    made = {}
    for name, (sections, _) in MODES.items():
        pipeline = {"device": "cpu", **sections.get("pipeline", {})}
        shape = {**SHAPE, "tie_word_embeddings": name in ("direct", "pieces", "eager")}
        train = {"micro_batch_size": 1, "gradient_accumulation_steps": 2, "max_steps": 3}
        folder = root / name.replace(" ", "-").replace(",", "")
        folder.mkdir()
        made[name] = write_config(
            folder,
            shape,
            {**sections, "train": {"output_dir": "run", **train}, "pipeline": pipeline},
        )
    return made


def train(
    configs: dict[str, Path],
    name: str,
    lanes: Callable[[torch.device], Lanes],
    ops: Callable[[tuple[Op, ...]], tuple[Op, ...]] | None = None,
    later: Later | None = None,
    passes: int = 0,
    scoring: Callable[[tuple[Op, ...]], tuple[Op, ...]] = lambda ops: ops,
) -> Outcome:
    return run(
        configs[name],
        lanes,
        length=6,
        poison=True,
        decided=MODES[name][1],
        ops=ops,
        later=later,
        passes=passes,
        scoring=scoring,
    )
