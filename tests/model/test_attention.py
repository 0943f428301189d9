"""Documents in one row are trained as if each had a row of its own; grouped heads stay grouped."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from megatrain_cli.errors import InternalError, ModelError
from megatrain_cli.model import attention
from megatrain_cli.model.attention import find_documents, packed_attention
from megatrain_cli.model.discover import discover, make_skeleton
from megatrain_cli.model.loss import supervised_positions
from megatrain_cli.model.template import LayerTemplate, Prologue
from tests.families import KINDS, WINDOW, make_tiny, tiny_config
from tests.model.streamed import LAYERS, Streamed, pack, random_ids, save_and_open

every_family = pytest.mark.parametrize("kind", KINDS)

# Lengths of the documents of each row; some are longer than Mistral's window of 8, one is a token.
LENGTHS = ((5, 14, 1, 4), (11, 13))
NUM_TOKENS = 24


def number(lengths: tuple[tuple[int, ...], ...] = LENGTHS) -> NDArray[np.int32]:
    return np.array([np.repeat(np.arange(len(row)), row) for row in lengths], dtype=np.int32)


def open_packed(kind: str, folder: Path) -> tuple[PreTrainedModel, Streamed]:
    """Hugging Face's model with plain attention, and ours with packed."""
    model = save_and_open(make_tiny(kind, tied=True), folder, torch.float32, "sdpa")
    return model, Streamed.open(model, folder, torch.float32, "packed")


def pieces() -> list[tuple[int, slice]]:
    """Row and place of each document."""
    return [
        (row, slice(sum(lengths[:k]), sum(lengths[: k + 1])))
        for row, lengths in enumerate(LENGTHS)
        for k in range(len(lengths))
    ]


@every_family
def test_packed_documents_have_the_logits_of_rows_of_their_own(kind: str, tmp_path: Path) -> None:
    model, streamed = open_packed(kind, tmp_path)
    ids = random_ids(2, NUM_TOKENS)
    found = streamed.logits(ids, number())
    for row, piece in pieces():
        expected = model(input_ids=ids[row, piece][None], use_cache=False).logits[0]
        torch.testing.assert_close(found[row, piece], expected, rtol=1e-6, atol=2e-6)


@every_family
def test_a_packed_step_has_the_loss_and_gradients_of_separate_rows(
    kind: str, tmp_path: Path
) -> None:
    model, streamed = open_packed(kind, tmp_path)
    ids = random_ids(2, NUM_TOKENS)
    labels = ids.clone()
    labels[0, 6:9] = -100
    total, num_targets = torch.zeros(()), 0
    for row, piece in pieces():
        own = labels[row, piece][1:]
        logits = model(input_ids=ids[row, piece][None], use_cache=False).logits[0, :-1]
        total = total + F.cross_entropy(logits, own, ignore_index=-100, reduction="sum")
        num_targets += int((own != -100).sum())
    (total / num_targets).backward()
    loss, found = streamed.loss_and_gradients(ids, labels, 11, documents=number())
    assert abs(loss.item() * num_targets - total.item()) <= 1e-6 * total.item()
    for name, param in model.named_parameters():
        assert param.grad is not None
        error = float((found[name] - param.grad).norm() / param.grad.norm())
        # A key's bias has a gradient that is a difference of large terms: what rounding leaves of
        # it depends on the number of threads (2.5e-6 with two, less than 2e-6 with one).
        assert error < (1e-5 if "bias" in name else 1e-6), name


@every_family
def test_rows_of_one_document_are_plain_rows_bit_for_bit(kind: str, tmp_path: Path) -> None:
    model, streamed = open_packed(kind, tmp_path)
    plain = Streamed.open(model, tmp_path, torch.float32, "sdpa")
    for length in (WINDOW - 1, NUM_TOKENS):
        ids = random_ids(1, length)  # a mask made for many rows takes another kernel
        expected = plain.logits(ids)
        assert torch.equal(streamed.logits(ids), expected)
        assert torch.equal(streamed.logits(ids, number(((length,),))), expected)


@every_family
def test_a_document_does_not_move_a_bit_of_its_neighbours(kind: str, tmp_path: Path) -> None:
    _, streamed = open_packed(kind, tmp_path)
    prologue = Prologue(streamed.skeleton)
    ids, documents = random_ids(1, NUM_TOKENS), number(((5, 14, 5),))
    other = ids.clone()
    other[0, 5:19] = random_ids(1, 14, seed=9)[0]
    assert not torch.equal(ids, other)

    def losses_and_gradient(tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Each token's loss, and the gradient of their sum for what the first layer is given."""
        first, args = prologue(prologue.leaves(streamed.runs[0]), tokens, pack(documents))
        first = hidden = first.detach().requires_grad_()
        for index in range(LAYERS):
            template = LayerTemplate(streamed.skeleton, index)
            hidden = template(template.leaves(streamed.runs[index + 1]), hidden, args[index])
        # Of no weight at all: any function of a token's own hidden state does for its loss.
        losses = hidden.square().sum(-1)[0]
        [gradient] = torch.autograd.grad(losses.sum(), first)
        return losses.detach(), gradient[0]

    for before, after in zip(losses_and_gradient(ids), losses_and_gradient(other), strict=True):
        assert torch.equal(before[:5], after[:5])
        assert torch.equal(before[19:], after[19:])
        assert not torch.equal(before[5:19], after[5:19])


@given(st.lists(st.lists(st.integers(0, 2), min_size=6, max_size=6), min_size=1, max_size=3))
def test_positions_and_targets_follow_the_documents(rows: list[list[int]]) -> None:
    documents = np.array(rows, dtype=np.int32)
    positions, starts = find_documents(documents)
    assert positions.dtype == np.int64
    assert starts.dtype == np.int32
    expected_starts: list[int] = []
    expected_positions: list[int] = []
    targets: list[int] = []
    for r, row in enumerate(rows):
        for c, document in enumerate(row):
            goes_on = c > 0 and row[c - 1] == document
            expected_positions.append(expected_positions[-1] + 1 if goes_on else 0)
            if goes_on:
                targets.append(r * 6 + c - 1)
            else:
                expected_starts.append(r * 6 + c)
    assert starts.tolist() == [*expected_starts, documents.size]
    assert positions.flatten().tolist() == expected_positions
    found, labels = supervised_positions(np.arange(documents.size).reshape(-1, 6), documents)
    assert found.tolist() == targets
    assert labels.tolist() == [position + 1 for position in targets]


def by_definition(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """What torch documents `varlen_attn` to compute, over one dense mask."""
    total, groups = len(query), query.shape[1] // key.shape[1]
    assert cu_seq_q is cu_seq_k
    assert max_q == max_k >= int(cu_seq_q.diff().max())
    assert window_size[1] == 0
    places = torch.arange(total)
    document = torch.searchsorted(cu_seq_q[1:].long(), places, right=True)
    back = places[:, None] - places
    mask = (document[:, None] == document) & (back >= 0)
    if window_size[0] >= 0:
        mask &= back <= window_size[0]
    wide_key, wide_value = (x.transpose(0, 1).repeat_interleave(groups, 0) for x in (key, value))
    return F.scaled_dot_product_attention(
        query.transpose(0, 1), wide_key, wide_value, attn_mask=mask, scale=scale
    ).transpose(0, 1)


@pytest.mark.parametrize("window", [None, 3, NUM_TOKENS])
@pytest.mark.parametrize("documents", [None, number()], ids=["whole rows", "packed"])
def test_all_documents_at_once_are_the_documents_one_by_one(
    window: int | None, documents: NDArray[np.int32] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_attend", by_definition)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, NUM_TOKENS, heads, 16, generator=generator).transpose(1, 2)
        for heads in (4, 2, 2)
    )
    packed = pack(documents)
    starts = None if packed is None else packed.starts
    module = torch.nn.Module()
    module.num_key_value_groups = 2  # type: ignore[assignment]  # as attention modules have it
    expected, _ = packed_attention(
        module, query, key, value, None, 0.0, 0.3, window, document_starts=starts
    )
    query, key, value = (x.to(torch.bfloat16) for x in (query, key, value))
    found = attention._all_at_once(query, key, value, 0.3, window, starts)
    assert found.shape == expected.shape == (2, NUM_TOKENS, 4, 16)
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        ({"dropout": 0.1}, "dropout in attention"),
        ({"softcap": 50.0}, "soft-capped scores"),
        ({"s_aux": torch.zeros(1)}, "attention sinks"),
        ({"position_bias": torch.zeros(1)}, "a bias on scores"),
    ],
)
def test_what_packed_rows_cannot_have_is_refused_by_name(
    asked: dict[str, float | Tensor], what: str
) -> None:
    heads = torch.zeros(1, 1, 4, 16)
    with pytest.raises(ModelError, match=what):
        packed_attention(torch.nn.Module(), heads, heads, heads, None, **asked)  # type: ignore[arg-type]  # what a family might give


def test_wide_heads_are_refused() -> None:
    heads = torch.zeros(1, 1, 4, 264)
    with pytest.raises(ModelError, match="heads of 264 elements, above 256"):
        packed_attention(torch.nn.Module(), heads, heads, heads, None)


def test_values_of_another_width_than_keys_are_refused() -> None:
    """As latent attention has them: the GPU's kernel takes one width."""
    heads = torch.zeros(1, 2, 4, 24)
    with pytest.raises(ModelError, match="keys of 24 elements a head and values of 16"):
        packed_attention(torch.nn.Module(), heads, heads, heads[..., :16], None)


@pytest.mark.parametrize("width", [12, 16])
def test_what_the_gpu_kernel_cannot_take_is_refused(width: int) -> None:
    heads = torch.zeros(1, 1, 4, width, dtype=torch.float32 if width == 16 else torch.bfloat16)
    with pytest.raises(ModelError, match="need 16-bit numbers and heads of a multiple of 8"):
        attention._all_at_once(heads, heads, heads, None, None, None)


def test_dropout_in_attention_is_refused_before_any_weight_is_read(tmp_path: Path) -> None:
    tiny_config("llama", tied=True, attention_dropout=0.1).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="LlamaAttention has dropout in attention"):
        discover(tmp_path, dtype=torch.float32, attention="packed")


def test_plain_attention_takes_no_packed_rows() -> None:
    skeleton = make_skeleton(tiny_config("llama", tied=True), dtype=torch.float32, attention="sdpa")
    prologue = Prologue(skeleton)
    leaves = prologue.leaves(torch.zeros(skeleton.layouts[0].numel))
    with pytest.raises(InternalError, match="Packed rows"):
        prologue(leaves, random_ids(1, NUM_TOKENS), pack(number(((10, 14),))))


Calls = list[tuple[Tensor | None, bool, int, int]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Mask, `enable_gqa`, and heads of query and key of each call of torch's attention."""
    seen: Calls = []
    inner: Callable[..., Tensor] = F.scaled_dot_product_attention

    def spy(query: Tensor, key: Tensor, value: Tensor, **options: object) -> Tensor:
        mask = options.get("attn_mask")
        assert mask is None or isinstance(mask, Tensor)
        assert (mask is None) == bool(options["is_causal"])
        seen.append((mask, bool(options.get("enable_gqa")), query.shape[1], key.shape[1]))
        return inner(query, key, value, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    return seen


@every_family
def test_plain_rows_need_no_mask_and_keys_are_not_repeated(
    kind: str, calls: Calls, tmp_path: Path
) -> None:
    model = save_and_open(make_tiny(kind, tied=True), tmp_path, torch.float32, "sdpa")
    streamed = Streamed.open(model, tmp_path, torch.float32, "sdpa")
    calls.clear()
    streamed.logits(random_ids(2, WINDOW - 1))  # rows within Mistral's window
    heads = (4, 4) if kind == "gpt2" else (4, 2)
    assert calls == [(None, kind != "gpt2", *heads)] * LAYERS


@pytest.mark.parametrize("length", [WINDOW, WINDOW + 1])
def test_rows_as_long_as_a_window_cost_a_mask_and_repeated_keys(
    length: int, calls: Calls, tmp_path: Path
) -> None:
    model = save_and_open(make_tiny("mistral", tied=True), tmp_path, torch.float32, "sdpa")
    streamed = Streamed.open(model, tmp_path, torch.float32, "sdpa")
    calls.clear()
    streamed.logits(random_ids(2, length))
    assert len(calls) == LAYERS
    for mask, grouped, *heads in calls:
        assert mask is not None
        assert mask.shape[-2:] == (length, length)
        assert not grouped
        assert heads == [4, 4]
