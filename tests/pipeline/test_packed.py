"""A step of packed rows is the step of the same documents in rows of their own."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.engine import Outcome, Settings, inline, run, write_config

SHAPE: Settings = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
}
EXACT = {
    "model": {"path": "model", "init": "random", "dtype": "float32"},
    "optimizer": {"master": "fp32"},
    "pipeline": {"device": "cpu"},
}


def step_of(
    folder: Path, rows: int, length: int, documents: NDArray[np.int32] | None = None
) -> Outcome:
    """One step of one micro-batch; its tokens, row after row, depend on rows x length alone."""
    return run(
        write_config(folder, SHAPE, EXACT),
        inline,
        steps=1,
        length=length,
        decided={"micro_batch_size": rows, "num_micro_batches": 1},
        documents=None if documents is None else [documents],
    )


def halves(rows: int, length: int) -> NDArray[np.int32]:
    return np.tile(np.arange(length, dtype=np.int32) // (length // 2), (rows, 1))


def test_a_packed_step_is_the_step_of_its_documents(tmp_path: Path) -> None:
    packed = step_of(tmp_path / "packed", 2, 64, halves(2, 64))
    apart = step_of(tmp_path / "apart", 4, 32)
    mixed = step_of(tmp_path / "mixed", 2, 64)
    assert abs(packed.losses[0] - apart.losses[0]) <= 1e-6 * apart.losses[0]
    assert abs(packed.norms[0] - apart.norms[0]) <= 1e-6 * apart.norms[0]
    for a, b in zip(packed.gradients, apart.gradients, strict=True):
        assert (a - b).abs().max() <= 1e-6 * b.abs().max()
    assert abs(mixed.losses[0] - apart.losses[0]) > 1e-4  # it matters


def test_packed_rows_of_one_document_are_plain_rows(tmp_path: Path) -> None:
    whole = step_of(tmp_path / "whole", 2, 64, np.zeros((2, 64), dtype=np.int32))
    plain = step_of(tmp_path / "plain", 2, 64)
    assert abs(whole.losses[0] - plain.losses[0]) <= 1e-6 * plain.losses[0]
    for a, b in zip(whole.gradients, plain.gradients, strict=True):
        assert (a - b).abs().max() <= 1e-6 * b.abs().max()
