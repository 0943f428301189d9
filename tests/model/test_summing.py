"""Sums and norms in pieces are those of the whole, bit for bit."""

import pytest
import torch

from megatrain_cli.model import summing
from megatrain_cli.model.summing import add_in_place, row_norms


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summing, "_PIECE", 8)


@pytest.mark.parametrize("shape", [(), (1,), (8,), (3, 5), (2, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_is_added_whole(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    total, part = torch.randn(shape), torch.randn(shape).to(dtype)
    wanted = total + part.float()
    add_in_place(total, part)
    assert torch.equal(total, wanted)


def test_a_part_that_lies_across_is_added_where_it_belongs() -> None:
    total, part = torch.zeros(4, 6), torch.randn(6, 4).bfloat16().t()
    add_in_place(total, part)
    assert torch.equal(total, part.float())


@pytest.mark.parametrize("rows", [0, 1, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_those_of_each_row_in_fp32(rows: int, dtype: torch.dtype) -> None:
    found = torch.randn(rows, 3).to(dtype)
    assert torch.equal(row_norms(found), torch.linalg.vector_norm(found.float(), dim=1))
