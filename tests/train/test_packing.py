"""Packed training is the training of the same documents, each alone in a row."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from megatrain_cli.pipeline.compute import MicroBatch
from megatrain_cli.train.layout import StepRows
from tests.train.workspace import Started, make_workspace, start

LENGTH = 160  # of a row; three or four documents of 33 to 52 tokens
KINDS = ("llama", "qwen2", "mistral", "gpt2")


@contextmanager
def begun(folder: Path, kind: str, *, packing: bool) -> Iterator[Started]:
    """A run of one step over all 12 documents, however they are laid out."""
    folder.mkdir()
    positions = "n_positions" if kind == "gpt2" else "max_position_embeddings"
    config = make_workspace(
        folder,
        kind,
        model={positions: LENGTH},
        data={"max_length": LENGTH, "packing": packing},
        train={"max_steps": None, "num_epochs": 1, "micro_batch_size": 12},
        optimizer={"learning_rate": 0.0},  # so that a step leaves the weights to the next one
    )
    with start(config) as run:
        yield run


def one_step(run: Started) -> tuple[float, float, int, dict[str, torch.Tensor]]:
    (record,) = run.steps()
    return (
        record.loss,
        record.grad_norm,
        record.tokens,
        run.by_name(lambda tile: tile.gradient),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_packed_training_equals_unpacked_training(kind: str, tmp_path: Path) -> None:
    """Losses and gradients; LAB-08, and for Mistral with a window of 8 tokens."""
    with begun(tmp_path / "apart", kind, packing=False) as run:
        loss, norm, tokens, expected = one_step(run)
    with begun(tmp_path / "packed", kind, packing=True) as run:
        packs = run.rows.packs
        assert packs is not None
        assert len(packs) <= 4 < 12 == len(packs.documents)
        found = one_step(run)
    assert found[2] == tokens
    assert abs(found[0] - loss) <= 1e-6 * loss
    assert abs(found[1] - norm) <= 1e-6 * norm
    for name, gradient in expected.items():
        assert (found[3][name] - gradient).abs().max() <= 1e-6 * gradient.abs().max(), name


def loss_of_second(run: Started, first: NDArray[np.int64], *, isolated: bool) -> float:
    """Of the second document of a row; the first one, of tokens `first`, teaches nothing."""
    ids, _ = run.rows.examples.row(0)  # all of it: a window of 8 tokens sees no farther
    document = np.repeat([0, 1], [len(first), len(ids)]).astype(np.int32)
    if not isolated:
        document[:] = 0
    row = MicroBatch(
        np.concatenate([first, ids])[None],
        np.concatenate([np.full_like(first, -100), ids])[None],
        document[None],
    )
    pad = MicroBatch(row.input_ids[:, :2], np.full((1, 2), -100), np.zeros((1, 2), np.int32))
    step = StepRows([row] + [pad] * 11, 1)

    class Rows:
        total_steps, rows_per_step, rows_per_epoch = 1, 1, 1

        def of_step(self, index: int) -> StepRows:
            del index
            return step

    fixed: Any = Rows()
    (record,) = Started(run.loaded, run.engine, fixed).steps()
    return record.loss


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_document_says_moves_no_other_documents_loss(kind: str, tmp_path: Path) -> None:
    """Bit for bit."""
    with begun(tmp_path / "run", kind, packing=True) as run:
        first, _ = run.rows.examples.row(1)
        changed = (first + 7) % 256
        apart = [loss_of_second(run, row, isolated=True) for row in (first, changed)]
        mixed = [loss_of_second(run, row, isolated=False) for row in (first, changed)]
    assert apart[0].hex() == apart[1].hex()
    assert abs(mixed[0] - mixed[1]) > 1e-5  # the control: in one document it moves


def test_of_rows_that_are_laid_out_no_token_is_lost(tmp_path: Path) -> None:
    """All that a step hands to the engine, read back document by document."""
    with begun(tmp_path / "run", "llama", packing=True) as run:
        packs, step = run.rows.packs, run.rows.of_step(0)
        assert packs is not None
        assert step.num_rows == len(packs)
        assert len(step.micro_batches) == 12
        for place, micro in enumerate(step.micro_batches):
            assert micro.documents is not None
            assert micro.documents.dtype == np.int32
            if place >= len(packs):  # nothing to learn, and one document
                assert (micro.labels == -100).all()
                assert not micro.documents.any()
                continue
            (row,) = run.rows._stream.rows(place, place + 1)
            for number, i in enumerate(packs.row(row)):
                here = micro.documents == number
                ids, labels = run.rows.examples.row(i)
                assert micro.input_ids[here].tolist() == ids.tolist()
                assert micro.labels[here].tolist() == labels.tolist()


def test_rows_of_one_length_end_with_a_document_that_teaches_nothing(tmp_path: Path) -> None:
    with begun(tmp_path / "run", "llama", packing=True) as run:
        d = replace(
            run.engine.plan.decisions, micro_batch_size=3, num_micro_batches=2, compiled=True
        )
        packs, batches = run.rows.packs, run.rows.planned(d).of_step(0).micro_batches
        assert packs is not None
        rows = [row for micro in batches for row in zip(*layers(micro), strict=True)]
        filled = [packs.row(i) for i in run.rows._stream.rows(0, len(packs))]
        assert len(rows) == 6 > len(filled)
        filled += [[]] * (6 - len(filled))  # rows of padding alone
        for (ids, labels, numbers), documents in zip(rows, filled, strict=True):
            assert len(ids) == d.max_length
            assert set(numbers) == set(range(len(documents) + 1))
            assert (np.diff(numbers) >= 0).all()
            assert (labels[numbers == len(documents)] == -100).all()


def layers(micro: MicroBatch) -> tuple[NDArray[np.integer], ...]:
    assert micro.documents is not None
    return micro.input_ids, micro.labels, micro.documents
