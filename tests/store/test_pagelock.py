"""Page-locking in place: all that crosses the link or nothing, and no stale error left behind."""

import pytest
import torch

from megatrain_cli.errors import DeviceError
from megatrain_cli.model.layout import make_layout
from megatrain_cli.model.spec import LayerSpec, ParamSpec
from megatrain_cli.plan.tiles import PAGE_BYTES, TileFormat, store_bytes
from megatrain_cli.store.arena import Arena
from megatrain_cli.store.master import MasterStore

FORMAT = TileFormat("bfloat16", "fp32_split", keep_gradient=True)
LAYOUTS = tuple(
    make_layout(LayerSpec(name, "kind", (ParamSpec(f"{name}.weight", (100, 33)),)))
    for name in ("embed", "layer-00000", "head")
)


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


def test_a_refused_range_unlocks_those_before_it_and_clears_the_stale_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cudart = FakeCudart(refuse=3)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    arena = Arena(3 * PAGE_BYTES)
    cuts = [arena.take(PAGE_BYTES) for _ in range(3)]
    arena.register(cuts[0])
    arena.register(cuts[1])
    assert arena.locked_bytes == 2 * PAGE_BYTES
    with pytest.raises(DeviceError, match=r"4\.00 KiB \(CUDA error 2\).*8\.00 KiB had been locked"):
        arena.register(cuts[2])
    assert cudart.locked == {}
    assert arena.locked_bytes == 0
    assert cudart.last_error == 0


def test_closing_unlocks_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = FakeCudart(refuse=0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    arena = Arena(2 * PAGE_BYTES)
    arena.register(arena.take(100))
    assert list(cudart.locked.values()) == [PAGE_BYTES]
    arena.close()
    assert cudart.locked == {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with CUDA locks the page")
def test_without_cuda_page_locking_says_so() -> None:
    arena = Arena(PAGE_BYTES)
    with pytest.raises(DeviceError, match="without CUDA"):
        arena.register(arena.take(1))


@pytest.mark.gpu
def test_the_driver_locks_a_cut_and_torch_sees_it_as_pinned() -> None:
    arena = Arena(1 << 20)
    cut = arena.take(1 << 20)
    arena.register(cut)
    assert cut.is_pinned()
    with pytest.raises(DeviceError):
        arena.register(cut)  # the same range twice
    assert torch.zeros(3, device="cuda").sum().item() == 0
    arena.close()


def test_registering_locks_what_crosses_the_link_and_keeps_contents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cudart = FakeCudart(refuse=0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    store = MasterStore(LAYOUTS, FORMAT)
    values = torch.randn(100, 33)
    store.tiles[0].write_master("embed.weight", values)
    store.register()
    sizes = store_bytes(LAYOUTS, FORMAT)
    assert store.locked_bytes == sum(cudart.locked.values()) == sizes["weights"] + sizes["gradient"]
    assert torch.equal(store.tiles[0].read_master("embed.weight"), values)
    store.close()
    assert cudart.locked == {}


def test_a_refused_layer_is_named_and_nothing_stays_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = FakeCudart(refuse=2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    store = MasterStore(LAYOUTS, FORMAT)
    with pytest.raises(DeviceError, match="layer-00000: The driver refused"):
        store.register()
    assert cudart.locked == {}
    store.tiles[0].write_master("embed.weight", torch.ones(100, 33))
