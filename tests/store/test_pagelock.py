"""Page-locking in place: all that crosses the link or nothing, and no stale error left behind."""

import pytest
import torch

from megatrain_cli.errors import DeviceError, InternalError
from megatrain_cli.model.layout import make_layout
from megatrain_cli.model.spec import LayerSpec, ParamSpec
from megatrain_cli.plan.tiles import PAGE_BYTES, TileFormat, store_bytes
from megatrain_cli.store.arena import Arena
from megatrain_cli.store.master import MasterStore
from tests.store.cudart import fake_driver

FORMAT = TileFormat("bfloat16", "fp32_split", keep_gradient=True)
LAYOUTS = tuple(
    make_layout(LayerSpec(name, "kind", (ParamSpec(f"{name}.weight", (100, 33)),)))
    for name in ("embed", "layer-00000", "head")
)


def test_a_refused_range_unlocks_those_before_it_and_clears_the_stale_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cudart = fake_driver(monkeypatch, refuse=3)
    arena = Arena(3 * PAGE_BYTES)
    cuts = [arena.take(PAGE_BYTES) for _ in range(3)]
    arena.register(cuts[0], "cut", "do without")
    arena.register(cuts[1], "cut", "do without")
    assert arena.locked_bytes == 2 * PAGE_BYTES
    message = (
        r"^cut: The driver refused to page-lock 4\.00 KiB \(CUDA error 2\)\. 8\.00 KiB had been "
        r"locked before and are free again\. Raise the limit .*\(`ulimit -l`\), or do without\.$"
    )
    with pytest.raises(DeviceError, match=message):
        arena.register(cuts[2], "cut", "do without")
    assert cudart.locked == {}
    assert arena.locked_bytes == 0
    assert cudart.last_error == 0


def test_closing_unlocks_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = fake_driver(monkeypatch)
    arena = Arena(2 * PAGE_BYTES)
    arena.register(arena.take(100), "cut", "do without")
    assert list(cudart.locked.values()) == [PAGE_BYTES]
    arena.close()
    assert cudart.locked == {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with CUDA locks the page")
def test_without_cuda_page_locking_says_so() -> None:
    arena = Arena(PAGE_BYTES)
    with pytest.raises(DeviceError, match="without CUDA"):
        arena.register(arena.take(1), "cut", "do without")


@pytest.mark.gpu
def test_the_driver_locks_a_cut_and_torch_sees_it_as_pinned() -> None:
    arena = Arena(1 << 20)
    cut = arena.take(1 << 20)
    arena.register(cut, "cut", "do without")
    assert cut.is_pinned()
    with pytest.raises(DeviceError):
        arena.register(cut, "cut", "do without")  # the same range twice
    assert torch.zeros(3, device="cuda").sum().item() == 0
    arena.close()


def test_registering_locks_what_crosses_the_link_and_keeps_contents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cudart = fake_driver(monkeypatch)
    store = MasterStore(LAYOUTS, FORMAT)
    values = torch.randn(100, 33)
    store.tiles[0].write_master("embed.weight", values)
    store.register()
    sizes = store_bytes(LAYOUTS, FORMAT)
    assert store.locked_bytes == sum(cudart.locked.values()) == sizes["weights"] + sizes["gradient"]
    assert torch.equal(store.tiles[0].read_master("embed.weight"), values)
    store.close()
    assert cudart.locked == {}


@pytest.mark.parametrize("refuse", [1, 2, 3])
def test_a_refused_layer_is_named_and_nothing_stays_locked(
    refuse: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cudart = fake_driver(monkeypatch, refuse)
    store = MasterStore(LAYOUTS, FORMAT)
    name = LAYOUTS[refuse - 1].layer.name
    with pytest.raises(DeviceError, match=f"^{name}: The driver.*`store.memory: pageable`"):
        store.register()
    assert cudart.locked == {}
    assert cudart.last_error == store.locked_bytes == 0
    store.tiles[0].write_master("embed.weight", torch.ones(100, 33))
    store.register()  # the driver may have changed its mind
    assert len(cudart.locked) == 3


def test_page_locking_a_part_locks_its_pages_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cudart = fake_driver(monkeypatch)
    arena = Arena(4 * PAGE_BYTES)
    whole = arena.take(4 * PAGE_BYTES)
    whole.copy_(torch.arange(4 * PAGE_BYTES) % 251)
    arena.register(whole[PAGE_BYTES + 5 : 2 * PAGE_BYTES + 9], "part", "do without")
    assert cudart.locked == {whole.data_ptr() + PAGE_BYTES: 2 * PAGE_BYTES}
    assert torch.equal(whole, (torch.arange(4 * PAGE_BYTES) % 251).to(torch.uint8))
    arena.close()
    with pytest.raises(InternalError, match="closed"):
        arena.register(whole, "part", "do without")
