"""A pool copies what one thread copies, however the bytes are cut; several may use it at once."""

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.errors import InternalError
from megatrain_cli.pipeline import copying
from megatrain_cli.pipeline.copying import CopyPool


def noise(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(
        256, (numel,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


@given(st.integers(0, 40_000), st.integers(1, 5), st.integers(1, 9000))
def test_every_byte_arrives_and_none_beside_it(numel: int, threads: int, part_bytes: int) -> None:
    source, target = noise(numel), torch.zeros(numel + 2, dtype=torch.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "_PART_BYTES", part_bytes)
        pool = CopyPool(threads)
        wait = pool.start(source, target[1:-1])
        wait()
        wait()
        pool.close()
    assert torch.equal(target[1:-1], source)
    assert target[0] == target[-1] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_any_dtype_is_copied_bit_for_bit(dtype: torch.dtype) -> None:
    bits = noise(1 << 16)
    target = torch.zeros((1 << 16) // dtype.itemsize, dtype=dtype)
    pool = CopyPool(2)
    pool.copy(bits.view(dtype), target)
    pool.close()
    assert torch.equal(target.view(torch.uint8), bits)


def test_threads_that_share_a_pool_get_their_own_bytes() -> None:
    pool = CopyPool(2)
    sources = [noise(3 << 20, seed) for seed in range(6)]
    targets = [torch.zeros(3 << 20, dtype=torch.uint8) for _ in sources]
    users = [
        threading.Thread(target=pool.copy, args=pair) for pair in zip(sources, targets, strict=True)
    ]
    for user in users:
        user.start()
    for user in users:
        user.join()
    pool.close()
    assert all(torch.equal(*pair) for pair in zip(sources, targets, strict=True))


def test_other_sizes_are_a_bug_and_closing_ends_the_threads() -> None:
    before = threading.active_count()
    pool = CopyPool(3)
    with pytest.raises(InternalError, match="5 bytes to 4"):
        pool.start(noise(5), noise(4))
    pool.copy(noise(1 << 22), noise(1 << 22))
    pool.close()
    pool.close()
    assert threading.active_count() == before
