"""Page-locking of memory that we own, through the CUDA runtime.

`cudaHostRegister` locks an existing range in place and at its exact size. Torch's own pinned
allocator rounds each block up to a power of two, which can double what a layer takes.
"""

import ctypes

import torch

from megatrain_cli.errors import DeviceError
from megatrain_cli.units import show_bytes


def lock_pages(address: int, num_bytes: int) -> None:
    """Page-lock `[address, address + num_bytes)` for copies to the current CUDA device.

    Raises:
        DeviceError: There is no CUDA, or the driver refused: often a limit of the platform on
            lockable memory (a container, WSL), not a lack of RAM.
    """
    try:
        cudart = torch.cuda.cudart()
    except (AssertionError, RuntimeError) as error:  # torch asserts when it is built without CUDA
        raise DeviceError(f"Memory cannot be page-locked without CUDA ({error}).") from error
    code = int(cudart.cudaHostRegister(address, num_bytes, 0))
    if code != 0:
        _clear_last_error(cudart)
        raise DeviceError(
            f"The driver refused to page-lock {show_bytes(num_bytes)} (CUDA error {code})."
        )


def unlock_pages(address: int) -> None:
    """Undo `lock_pages`; the range's contents stay."""
    cudart = torch.cuda.cudart()
    if int(cudart.cudaHostUnregister(address)) != 0:
        _clear_last_error(cudart)


def _clear_last_error(cudart: object) -> None:
    # The runtime remembers a failed call, and the next kernel launch, which checks for errors,
    # would be blamed for it. Torch's module may lack this function; its library is loaded anyway.
    clear = getattr(cudart, "cudaGetLastError", None)
    if clear is None:
        clear = getattr(ctypes.CDLL(None), "cudaGetLastError", None)
    if clear is not None:
        clear()
