"""Torch's settings of the whole process, as they were."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


def enabled_backends() -> tuple[bool, ...]:
    """Of `scaled_dot_product_attention`: cuDNN, flash, memory-efficient, unfused."""
    backends = torch.backends.cuda
    return (
        backends.cudnn_sdp_enabled(),
        backends.flash_sdp_enabled(),
        backends.mem_efficient_sdp_enabled(),
        backends.math_sdp_enabled(),
    )


@contextmanager
def settings_put_back() -> Iterator[None]:
    """Undo on leaving what a deterministic run sets for good."""
    before, workspace = enabled_backends(), os.environ.pop(_CUBLAS, None)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]  # torch sets it late
        backends = torch.backends.cuda
        backends.enable_cudnn_sdp(before[0])
        backends.enable_flash_sdp(before[1])
        backends.enable_mem_efficient_sdp(before[2])
        backends.enable_math_sdp(before[3])
        os.environ.pop(_CUBLAS, None)
        if workspace is not None:
            os.environ[_CUBLAS] = workspace
