"""The chunked loss and its gradients are Hugging Face's own, whatever the chunk."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatrain_cli.model.loss import (
    WholeChunks,
    chunked_loss,
    cut_positions,
    head_loss,
    supervised_positions,
)
from megatrain_cli.model.template import Head
from tests.families import KINDS, make_tiny
from tests.model.streamed import Streamed, random_ids, save_and_open


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().norm() / expected.detach().norm())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_loss_and_every_gradient_are_the_models_own(
    kind: str, tied: bool, attention: str, tmp_path: Path
) -> None:
    model = save_and_open(make_tiny(kind, tied=tied), tmp_path, torch.float32, attention)
    streamed = Streamed.open(model, tmp_path, torch.float32, attention)
    ids = random_ids(2, 13)
    labels = ids.clone()
    labels[0, :4] = -100
    labels[1, 7:] = -100
    expected_loss = model(input_ids=ids, labels=labels, use_cache=False).loss
    expected_loss.backward()
    expected = {name: param.grad for name, param in model.named_parameters()}
    for chunk in (1, 3, 11, 12):
        loss, found = streamed.loss_and_gradients(ids, labels, chunk)
        assert relative_error(loss, expected_loss) < 1e-6
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            assert gradient is not None
            # Below 1e-6 but for a key's bias, whose gradient is a difference of large terms.
            assert relative_error(found[name], gradient) < 2e-6, (chunk, name)


@pytest.mark.parametrize("chunk", [1, 3, 11, 12])
def test_a_row_of_eleven_tokens_has_ten_targets_and_the_models_loss(
    chunk: int, tmp_path: Path
) -> None:
    model = save_and_open(make_tiny("llama", tied=True), tmp_path, torch.float32, "sdpa")
    streamed = Streamed.open(model, tmp_path, torch.float32, "sdpa")
    ids = random_ids(1, 11)
    assert len(supervised_positions(ids.numpy())[0]) == 10
    loss, _ = streamed.loss_and_gradients(ids, ids, chunk)
    assert relative_error(loss, model(input_ids=ids, labels=ids).loss) < 1e-6


@given(st.data())
def test_each_supervised_label_but_a_rows_first_is_one_target(data: st.DataObject) -> None:
    rows, length = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    cell = st.sampled_from([-100, 0, 1, 2])
    labels = np.array(
        [[data.draw(cell) for _ in range(length)] for _ in range(rows)], dtype=np.int64
    )
    positions, targets = supervised_positions(labels)
    expected = [
        (row * length + column, labels[row, column + 1])
        for row in range(rows)
        for column in range(length - 1)
        if labels[row, column + 1] != -100
    ]
    assert list(zip(positions, targets, strict=True)) == expected
    assert positions.dtype == targets.dtype == np.int64


def fake_head(weights: Sequence[Tensor], tied: Sequence[Tensor], hidden: Tensor) -> Tensor:
    return hidden * weights[0] @ tied[0].T


FAKE_LOSS = head_loss(fake_head)


def make_fake(dtype: torch.dtype, n: int) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    norm = torch.rand(8, generator=generator).to(dtype).requires_grad_()
    embed = torch.randn(30, 8, generator=generator).to(dtype).requires_grad_()
    hidden = torch.randn(n, 8, generator=generator).to(dtype)
    return [norm], [embed], hidden, torch.randint(0, 30, (n,), generator=generator)


def test_only_supervised_positions_reach_the_head(tmp_path: Path) -> None:
    model = save_and_open(make_tiny("qwen2", tied=True), tmp_path, torch.float32, "sdpa")
    streamed = Streamed.open(model, tmp_path, torch.float32, "sdpa")
    head = Head(streamed.skeleton)
    rows: list[int] = []

    def counting(weights: Sequence[Tensor], tied: Sequence[Tensor], hidden: Tensor) -> Tensor:
        rows.append(len(hidden))
        return head(weights, tied, hidden)

    labels = random_ids(2, 20)
    labels[:, :18] = -100
    positions, targets = map(torch.from_numpy, supervised_positions(labels.numpy()))
    leaves, tied = head.leaves(streamed.runs[-1]), head.tied_leaves(streamed.runs[0])
    sums = [torch.zeros(x.shape) for x in (*leaves, *tied)]
    hidden = torch.randn(40, 32)[positions]
    chunked_loss(head_loss(counting), leaves, tied, hidden, targets, scale=0.25, chunk=3, sums=sums)
    assert rows == [3, 1]


def test_no_supervised_token_means_no_loss_and_no_gradient() -> None:
    norm, embed, hidden, targets = make_fake(torch.bfloat16, 0)
    sums = [torch.zeros(8), torch.zeros(30, 8)]
    loss, gradient = chunked_loss(
        FAKE_LOSS, norm, embed, hidden, targets, scale=1.0, chunk=4, sums=sums
    )
    assert loss.item() == 0
    assert loss.dtype == torch.float32
    assert gradient.shape == (0, 8)
    assert all(not total.any() for total in sums)


def test_gradients_are_added_to_what_is_there() -> None:
    norm, embed, hidden, targets = make_fake(torch.float32, 9)
    once = [torch.zeros(8), torch.zeros(30, 8)]
    twice = [torch.zeros(8), torch.zeros(30, 8)]
    for sums in (once, twice, twice):
        chunked_loss(FAKE_LOSS, norm, embed, hidden, targets, scale=0.1, chunk=4, sums=sums)
    for a, b in zip(once, twice, strict=True):
        torch.testing.assert_close(2 * a, b)


def test_many_chunks_in_bf16_sum_as_precisely_as_one() -> None:
    # 64 equal chunks: summed in BF16 the total would be some 5 % short.
    norm, embed, hidden, targets = make_fake(torch.bfloat16, 1)
    one = [torch.zeros(8), torch.zeros(30, 8)]
    many = [torch.zeros(8), torch.zeros(30, 8)]
    chunked_loss(FAKE_LOSS, norm, embed, hidden, targets, scale=1 / 64, chunk=1, sums=one)
    chunked_loss(
        FAKE_LOSS,
        norm,
        embed,
        hidden.repeat(64, 1),
        targets.repeat(64),
        scale=1 / 64,
        chunk=1,
        sums=many,
    )
    for a, b in zip(one, many, strict=True):
        assert relative_error(b, 64 * a) < 1e-5


def test_the_callers_graph_is_left_alone() -> None:
    norm, embed, hidden, targets = make_fake(torch.float32, 5)
    hidden.requires_grad_()
    sums = [torch.zeros(8), torch.zeros(30, 8)]
    with torch.no_grad():
        loss, gradient = chunked_loss(
            FAKE_LOSS, norm, embed, hidden, targets, scale=0.2, chunk=2, sums=sums
        )
    assert hidden.grad is None
    assert norm[0].grad is None
    assert not loss.requires_grad
    assert not gradient.requires_grad


@given(st.integers(0, 200), st.integers(1, 40), st.none() | st.integers(1, 40))
def test_chunks_cover_every_position_once_and_compiled_ones_have_one_size(
    count: int, chunk: int, whole: int | None
) -> None:
    cut = list(cut_positions(count, chunk, whole))
    assert [i for start, end, _ in cut for i in range(start, end)] == list(range(count))
    for start, end, size in cut:
        assert 1 <= end - start <= size
        if end - start < size:  # filled up: at most half of it is wasted
            assert size == whole
            assert 2 * (end - start) >= size
        if size != whole:
            assert size <= chunk
    assert (
        sum(size != whole for _, _, size in cut) <= -(-((whole or count) // 2) // chunk)
        or not whole
    )


@pytest.mark.parametrize("count", [0, 1, 4, 5, 9, 13, 14, 20])
def test_chunks_that_are_filled_up_change_no_gradient(count: int) -> None:
    """The function for whole chunks is given one size only, and counts nothing it was not given."""
    norm, embed, hidden, targets = make_fake(torch.float32, count)
    sizes: list[int] = []

    def whole(
        weights: Sequence[Tensor], tied: Sequence[Tensor], states: Tensor, wanted: Tensor
    ) -> Tensor:
        sizes.append(len(states))
        return FAKE_LOSS(weights, tied, states, wanted)

    sums = [[torch.zeros(8), torch.zeros(30, 8)] for _ in range(2)]
    plain = chunked_loss(
        FAKE_LOSS, norm, embed, hidden, targets, scale=0.2, chunk=100, sums=sums[0]
    )
    filled = chunked_loss(
        FAKE_LOSS,
        norm,
        embed,
        hidden,
        targets,
        scale=0.2,
        chunk=2,
        sums=sums[1],
        whole=WholeChunks(whole, 9),
    )
    assert sizes == [9] * ((count + 4) // 9)
    for a, b in zip([*plain, *sums[0]], [*filled, *sums[1]], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
