"""Page-locking without a driver: what was locked, what was refused, what error is left behind."""

import pytest
import torch

from megatrain_cli.plan.tiles import PAGE_BYTES


class FakeCudart:
    """Stands in for the CUDA runtime: refuses the n-th range, and remembers its last error."""

    def __init__(self, refuse: int) -> None:
        self.refuse = refuse
        self.locked: dict[int, int] = {}
        self.last_error = 0
        self.calls = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802  # CUDA's
        assert flags == 0
        assert address % PAGE_BYTES == size % PAGE_BYTES == 0
        self.calls += 1
        if self.calls == self.refuse:
            self.last_error = 2
            return 2
        self.locked[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802  # CUDA's
        del self.locked[address]
        return 0

    def cudaGetLastError(self) -> int:  # noqa: N802  # CUDA's
        error, self.last_error = self.last_error, 0
        return error


def fake_driver(monkeypatch: pytest.MonkeyPatch, refuse: int = 0) -> FakeCudart:
    """Page-locking goes to a stand-in, which refuses the n-th range; 0: none."""
    cudart = FakeCudart(refuse)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    return cudart
