"""Packed rows: several documents share a row, positions restart with each, and none sees another.

transformers calls `packed_attention` from every family's own attention module, as it is registered
under the name `packed`. No mask function has that name, so that the model makes no mask: a dense
one of T x T costs four times the attention itself (H200, documents of 512). Where the documents lie
reaches the layers as one more argument of the model's forward, which families hand on.

B batch, T tokens, H heads, D head width, C documents of a micro-batch.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from megatrain_cli.errors import ModelError

PACKED = "packed"

# Of FlashAttention 2, which `varlen_attn` calls; the CPU keeps to them, being the GPU's oracle.
_LARGEST_HEAD = 256
_HEAD_STEP = 8

# Newer torch wants to be told that keys have fewer heads; older torch takes them as they come.
_told = "enable_gqa" in inspect.signature(varlen_attn).parameters
_attend: Callable[..., Tensor] = partial(varlen_attn, enable_gqa=True) if _told else varlen_attn  # type: ignore[assignment]  # a tuple only where more than the output is asked for


@dataclass(frozen=True)
class PackedRows:
    """Where the documents of one micro-batch lie, on the device.

    Attributes:
        position_ids: `(B, T)` int64, counted from 0 in each document.
        starts: `(C + 1,)` int32, where each document begins in the flattened `(B * T,)`, and B * T.
    """

    position_ids: Tensor
    starts: Tensor


def find_documents(documents: NDArray[np.integer]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Positions and starts, as `PackedRows` has them, of rows given as document numbers.

    Args:
        documents: `(B, T)`; a document is a run of equal numbers within a row.
    """
    first = np.ones(documents.shape, dtype=np.bool_)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = np.flatnonzero(first)
    lengths = np.diff(starts, append=documents.size)
    positions = np.arange(documents.size) - np.repeat(starts, lengths)
    ends = np.append(starts, documents.size).astype(np.int32)
    return positions.reshape(documents.shape).astype(np.int64), ends


def halved_rows(rows: int, length: int, device: torch.device) -> PackedRows:
    """Rows of two documents each, to try out what packed rows will run through."""
    halves = np.broadcast_to(np.arange(length) >= length // 2, (rows, length))
    positions, starts = map(torch.from_numpy, find_documents(halves.astype(np.int32)))
    return PackedRows(positions.to(device), starts.to(device))


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    document_starts: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Causal attention within each document; waits for nothing on a GPU.

    Args:
        module: The attention module that calls.
        query: `(B, H, T, D)`.
        key: `(B, Hkv, T, D)`; H is a multiple of Hkv.
        value: As `key`, its width D too.
        attention_mask: Not read: there is none.
        dropout: Must be 0.
        scaling: Of the scores; None is D ** -0.5.
        sliding_window: A token sees itself and `sliding_window - 1` before it; None sees all.
        document_starts: As in `PackedRows`; None is one document a row.
        others: What this transformers' attention functions may be given besides.

    Returns:
        `(B, T, H, D)`, contiguous; and no attention weights.

    Raises:
        ModelError: The layer asks for something that packed rows cannot have.
    """
    _refuse(module, query, value, dropout, others)
    if sliding_window is not None and sliding_window >= query.shape[2]:
        sliding_window = None
    if query.is_cuda:
        return _all_at_once(query, key, value, scaling, sliding_window, document_starts), None
    return _one_by_one(module, query, key, value, scaling, sliding_window, document_starts), None


AttentionInterface.register(PACKED, packed_attention)


def _all_at_once(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None,
    starts: Tensor | None,
) -> Tensor:
    batch, _, num_tokens, width = query.shape
    if query.dtype not in (torch.bfloat16, torch.float16) or width % _HEAD_STEP:
        raise ModelError(
            f"Packed rows on a GPU need 16-bit numbers and heads of a multiple of {_HEAD_STEP} "
            f"elements; this model has {query.dtype} and {width}. Set `data.packing: false`."
        )
    if starts is None:
        total = batch * num_tokens
        starts = torch.arange(0, total + 1, num_tokens, dtype=torch.int32, device=query.device)
    out = _attend(
        *(x.transpose(1, 2).reshape(batch * num_tokens, -1, width) for x in (query, key, value)),
        starts,
        starts,
        # The longest that a document may be, not the longest of this batch: another number would
        # be another graph to compile.
        num_tokens,
        num_tokens,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
    )
    return out.view(batch, num_tokens, -1, width)


def _one_by_one(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None,
    starts: Tensor | None,
) -> Tensor:
    """Each document as if it were the only one of its row: the same call of the same kernel."""
    batch, num_heads, num_tokens, width = query.shape
    bounds: Sequence[int] = range(0, batch * num_tokens + 1, num_tokens)
    if starts is not None:
        bounds = starts.tolist()
    outputs = []
    for start, end in pairwise(bounds):
        row, first = divmod(start, num_tokens)
        q, k, v = (x[row : row + 1, :, first : first + end - start] for x in (query, key, value))
        mask = None if window is None else _band(end - start, window, query.device)
        outputs.append(sdpa_attention_forward(module, q, k, v, mask, scaling=scaling)[0])
    return torch.cat(outputs, dim=1).view(batch, num_tokens, num_heads, width)


def _band(length: int, window: int, device: torch.device) -> Tensor | None:
    """`(1, 1, length, length)` bool, true where a token sees another; None where it sees all."""
    if length <= window:
        return None
    place = torch.arange(length, device=device)
    back = place[:, None] - place
    return ((back >= 0) & (back < window))[None, None]


def _refuse(
    module: nn.Module, query: Tensor, value: Tensor, dropout: float, others: dict[str, object]
) -> None:
    width, of_values = query.shape[-1], value.shape[-1]
    asked = {
        "dropout in attention": dropout > 0,
        "soft-capped scores": others.get("softcap") is not None,
        "attention sinks": others.get("s_aux") is not None,
        "a bias on scores": others.get("position_bias") is not None,
        "attention to later tokens": not getattr(module, "is_causal", True),
        f"keys of {width} elements a head and values of {of_values}": width != of_values,
        f"heads of {width} elements, above {_LARGEST_HEAD}": width > _LARGEST_HEAD,
    }
    for what, is_asked in asked.items():
        if is_asked:
            raise ModelError(
                f"{type(module).__name__} has {what}, which packed rows cannot have. Set "
                "`data.packing: false`."
            )
