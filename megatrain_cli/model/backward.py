"""The thread that autograd computes a device's backward in, made ready for its first work."""

import torch


def wake_backward(device: torch.device) -> None:
    """Make the device's context current in autograd's thread; once a process, before any backward.

    That thread begins without one, and the first call of the CUDA runtime makes it current: a
    launch, or an allocation. cuBLAS only looks for it, so where a product comes first and all
    memory is at hand, torch warns and makes shift (`getCurrentCUDABlasHandle` in its
    CublasHandlePool.cpp). Launches one elementwise kernel and waits for nothing.

    Args:
        device: A CUDA device, the current one.
    """
    one = torch.ones((), device=device, requires_grad=True)
    (2 * one).backward()
