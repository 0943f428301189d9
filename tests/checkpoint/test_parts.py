"""Parts cover all of a tile but its gaps, each byte once, under the names that files promise."""

import pytest
import torch

from megatrain_cli.checkpoint.parts import DTYPE_NAMES, part_file, tile_parts
from megatrain_cli.checkpoint.places import ITEM_BYTES, check_places
from megatrain_cli.errors import InternalError
from megatrain_cli.model.layout import make_layout
from megatrain_cli.model.spec import LayerSpec, ParamSpec
from megatrain_cli.plan.tiles import TileFormat
from megatrain_cli.store.master import LayerTile, MasterStore
from tests.checkpoint.tiles import FORMATS, LAYOUTS, make_store, regions

each_format = pytest.mark.parametrize("fmt", FORMATS, ids=str)


def wanted(tile: LayerTile, name: str) -> torch.Tensor:
    """The values that a tensor of a file stands for, found another way."""
    prefixes = {
        "master_lo": tile.remainder,
        "master": tile.master,
        "exp_avg": tile.exp_avg,
        "exp_avg_sq": tile.exp_avg_sq,
        "grad": tile.gradient,
    }
    head, _, rest = name.partition(".")
    flat, param = (prefixes[head], rest) if head in prefixes else (tile.weights, name)
    assert flat is not None
    entry = tile.layout.by_name[param]
    return flat[entry.offset : entry.end]


@each_format
def test_each_tensor_of_a_part_has_its_parameters_bytes(fmt: TileFormat) -> None:
    for tile in make_store(fmt).tiles:
        for part in tile_parts(tile, fmt.keep_gradient):
            payload = b"".join(part.pieces)
            assert len(payload) == part.num_bytes
            check_places(part.tensors, len(payload))
            for place in part.tensors:
                values = wanted(tile, place.name)
                assert place.dtype == DTYPE_NAMES[values.dtype]
                assert (
                    payload[place.start : place.end] == values.view(torch.uint8).numpy().tobytes()
                )


@each_format
def test_every_parameter_is_there_once_in_each_region(fmt: TileFormat) -> None:
    for tile in make_store(fmt).tiles:
        for part in tile_parts(tile, fmt.keep_gradient):
            names = [place.name for place in part.tensors]
            assert len(names) == len(set(names))
            assert len(names) % len(tile.layout.entries) == 0
        parts = tile_parts(tile, fmt.keep_gradient)
        total = sum(part.num_bytes for part in parts)
        widths = [flat.element_size() for flat in regions(tile, gradient=fmt.keep_gradient)]
        assert total == tile.layout.layer.numel * sum(widths)


@each_format
def test_what_is_written_through_the_pieces_is_in_the_tile_and_gaps_stay_zero(
    fmt: TileFormat,
) -> None:
    store = MasterStore(LAYOUTS, fmt)
    for tile in store.tiles:
        for part in tile_parts(tile, fmt.keep_gradient):
            for piece in part.pieces:
                piece[:] = b"\xff" * piece.nbytes
        for flat in regions(tile, gradient=fmt.keep_gradient):
            data = flat.view(torch.uint8).view(-1, flat.element_size())
            for start, end in tile.layout.gaps:
                assert not data[start:end].any()
                data[start:end] = 0xFF
            assert (data == 0xFF).all()


def test_neighbours_without_a_gap_are_one_piece() -> None:
    shapes = {"a": (128,), "b": (2, 128), "c": (3,), "d": (128,)}
    params = tuple(ParamSpec(name, shape) for name, shape in shapes.items())
    layout = make_layout(LayerSpec("layer-00000", "kind", params))
    (tile,) = MasterStore((layout,), FORMATS[0]).tiles
    weights, optim = tile_parts(tile)
    assert [piece.nbytes for piece in weights.pieces] == [2 * (3 * 128 + 3), 2 * 128]
    assert len(optim.pieces) == 6


def test_names_of_files_and_tensors() -> None:
    tile = make_store().tiles[0]
    assert [part.file for part in tile_parts(tile, pending=True)] == [
        "model-embed.safetensors",
        "training/optim-embed.safetensors",
        "training/grads-embed.safetensors",
    ]
    assert part_file("weights", "layer-00012") == "model-layer-00012.safetensors"
    names = [[place.name for place in part.tensors] for part in tile_parts(tile, pending=True)]
    assert names == [
        ["embed.weight"],
        ["master_lo.embed.weight", "exp_avg.embed.weight", "exp_avg_sq.embed.weight"],
        ["grad.embed.weight"],
    ]
    shapes = {place.shape for part in tile_parts(tile) for place in part.tensors}
    assert shapes == {(41, 33)}


def test_dtypes_have_the_sizes_that_files_say() -> None:
    for dtype, name in DTYPE_NAMES.items():
        assert ITEM_BYTES[name] == dtype.itemsize


def test_a_pending_gradient_without_room_is_a_bug() -> None:
    (tile, *_) = make_store(TileFormat("bfloat16", "bf16", keep_gradient=False)).tiles
    with pytest.raises(InternalError, match="embed has no room for a pending gradient"):
        tile_parts(tile, pending=True)
