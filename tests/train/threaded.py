"""Whole runs on the threads of `CudaLanes`, on any machine."""

import pytest
import torch

from megatrain_cli.pipeline import cuda_lanes
from megatrain_cli.pipeline.cuda_lanes import CudaLanes
from megatrain_cli.train import assemble
from tests.pipeline import fake_cuda


def use_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on engines for the CPU have lanes with threads, over a device that is done at once.

    Updates of a step then go on beside the next one, as beside a GPU.
    """
    monkeypatch.setattr(cuda_lanes, "cuda", fake_cuda)
    monkeypatch.setattr(assemble, "InlineLanes", lambda: CudaLanes(torch.device("cpu")))
