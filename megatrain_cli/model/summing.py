"""Sums of BF16 gradients in FP32, and their norms, without an FP32 copy of them on the CPU.

There torch makes such a copy of a whole operand before it computes in another dtype. Of a piece of
it the copy stays in a cache, which is several times as fast and takes no memory. A GPU converts as
it computes and gets the whole.
"""

import torch

# Elements of a piece.
_PIECE = 1 << 18


def add_in_place(total: torch.Tensor, part: torch.Tensor) -> None:
    """`total += part`, of one shape, in the dtype of `total`."""
    if total.is_cuda or total.dtype == part.dtype or not part.is_contiguous():
        total.add_(part)
        return
    pieces = zip(total.view(-1).split(_PIECE), part.view(-1).split(_PIECE), strict=True)
    for piece, more in pieces:
        piece.add_(more)


def row_norms(rows: torch.Tensor) -> torch.Tensor:
    """Euclidean norm of each row of `(N, K)`, computed in FP32: `(N,)`, FP32."""
    if rows.is_cuda or rows.dtype == torch.float32:
        whole: torch.Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32)
        return whole
    norms = torch.empty(len(rows), dtype=torch.float32)
    count = max(1, _PIECE // rows.shape[1])
    for piece, found in zip(rows.split(count), norms.split(count), strict=True):
        torch.linalg.vector_norm(piece, dim=1, dtype=torch.float32, out=found)
    return norms
