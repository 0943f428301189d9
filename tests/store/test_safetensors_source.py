"""A folder fits its model in both directions or is refused by names; nothing is ever guessed."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatrain_cli.errors import CorruptError, ModelError
from megatrain_cli.model.layout import make_layout
from megatrain_cli.model.spec import LayerSpec, ModelSpec, ParamSpec
from megatrain_cli.plan.tiles import TileFormat
from megatrain_cli.store.load import fill_store
from megatrain_cli.store.master import MasterStore
from megatrain_cli.store.source import SafetensorsSource

EMBED = LayerSpec("embed", "embed", (ParamSpec("model.wte.weight", (11, 6)),))
LAYERS = tuple(
    LayerSpec(
        f"layer-{i:05d}",
        "block",
        (
            ParamSpec(f"model.h.{i}.norm.weight", (6,)),
            ParamSpec(f"model.h.{i}.fc.weight", (6, 6)),
            ParamSpec(f"model.h.{i}.fc.bias", (6,)),
        ),
        prefix=f"model.h.{i}",
    )
    for i in range(3)
)
HEAD = LayerSpec(
    "head", "head", (ParamSpec("model.norm.weight", (6,)), ParamSpec("lm_head.weight", (11, 6)))
)
TIED_HEAD = LayerSpec("head", "head", HEAD.params[:1])
ALIASES = {"lm_head.weight": "model.wte.weight"}


def spec_of(head: LayerSpec, tied: tuple[str, ...] = ()) -> ModelSpec:
    return ModelSpec("TinyForCausalLM", 6, 11, (EMBED, *LAYERS, head), tied, False, None)


SPEC = spec_of(HEAD)
TIED = spec_of(TIED_HEAD, ("model.wte.weight",))


def random_values(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    # Norms and biases too: with ones and zeros, "read" and "left at the start" look the same.
    torch.manual_seed(7)
    return {p.name: torch.randn(p.shape).to(dtype) for layer in spec.layers for p in layer.params}


def source_of(
    folder: Path,
    spec: ModelSpec = SPEC,
    ignored: tuple[str, ...] = (),
    aliases: Mapping[str, str] | None = None,
) -> SafetensorsSource:
    return SafetensorsSource(folder, spec, base_prefix="model", ignored=ignored, aliases=aliases)


def filled(source: SafetensorsSource, spec: ModelSpec) -> dict[str, torch.Tensor]:
    fmt = TileFormat("bfloat16", "fp32_split", keep_gradient=False)
    store = MasterStore(tuple(make_layout(layer) for layer in spec.layers), fmt)
    fill_store(store, source)
    return {
        p.name: tile.read_master(p.name) for tile in store.tiles for p in tile.layout.layer.params
    }


def assert_same(read: dict[str, torch.Tensor], values: dict[str, torch.Tensor]) -> None:
    assert read.keys() == values.keys()
    for name, value in values.items():
        assert torch.equal(read[name], value.float()), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_file_fills_every_parameter_exactly(tmp_path: Path, dtype: torch.dtype) -> None:
    values = random_values(SPEC, dtype)
    save_file(values, tmp_path / "model.safetensors")
    assert_same(filled(source_of(tmp_path), SPEC), values)


@pytest.mark.parametrize("with_index", [True, False])
def test_shards_are_found_with_and_without_an_index(tmp_path: Path, with_index: bool) -> None:
    values = random_values(SPEC)
    names = sorted(values)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-b.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: values[name] for name in part}, tmp_path / file)
    if with_index:
        weight_map = {name: file for file, part in files.items() for name in part}
        index = json.dumps({"metadata": {}, "weight_map": weight_map})
        (tmp_path / "model.safetensors.index.json").write_text(index)
        # An old shard that the index does not list is none of the model's.
        save_file({"stray": torch.zeros(1)}, tmp_path / "model-old.safetensors")
    assert_same(filled(source_of(tmp_path), SPEC), values)


def test_names_without_the_base_prefix_are_understood(tmp_path: Path) -> None:
    values = random_values(SPEC)
    bare = {name.removeprefix("model."): value for name, value in values.items()}
    save_file(bare, tmp_path / "model.safetensors")
    assert_same(filled(source_of(tmp_path), SPEC), values)


def test_names_with_a_prefix_that_the_model_lacks_are_understood(tmp_path: Path) -> None:
    values = random_values(SPEC)
    save_file({f"model.{k}": v for k, v in values.items()}, tmp_path / "model.safetensors")
    assert_same(filled(source_of(tmp_path), SPEC), values)


def test_one_parameter_under_both_names_is_refused(tmp_path: Path) -> None:
    values = random_values(SPEC)
    values["norm.weight"] = torch.zeros(6)
    save_file(values, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"1 parameters that the folder has twice: model\.norm"):
        source_of(tmp_path)


def test_all_problems_are_listed_at_once_by_name(tmp_path: Path) -> None:
    values = random_values(SPEC)
    del values["model.h.1.fc.bias"]
    values["model.h.0.norm.weight"] = torch.zeros(7)
    values["model.h.2.fc.weight"] = torch.zeros(6, 6, dtype=torch.int8)
    values["model.h.2.norm.weight"] = torch.zeros(6, dtype=torch.float8_e4m3fn)
    values |= {f"extra.{i:02d}": torch.zeros(1) for i in range(20)}
    save_file(values, tmp_path / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        source_of(tmp_path)
    message = str(caught.value)
    assert "does not fit TinyForCausalLM" in message
    assert "20 tensors in the folder that the model does not have: extra.00" in message
    assert "extra.07 and 12 more" in message
    assert "extra.08" not in message
    assert "1 parameters that the folder lacks: model.h.1.fc.bias" in message
    assert "model.h.0.norm.weight (7,), not (6,)" in message
    assert "model.h.2.fc.weight (I8)" in message
    assert "model.h.2.norm.weight (F8_E4M3)" in message


def test_ignored_names_are_patterns(tmp_path: Path) -> None:
    values = random_values(SPEC)
    stored = values | {"h.0.attn.masked_bias": torch.zeros(1, dtype=torch.bool)}
    save_file(stored, tmp_path / "model.safetensors")
    assert_same(filled(source_of(tmp_path, ignored=(r"attn\.masked_bias$",)), SPEC), values)


def test_a_tied_copy_is_accepted_when_it_equals_the_embedding(tmp_path: Path) -> None:
    values = random_values(TIED)
    head = values["model.wte.weight"].clone()
    head[0, 0] = values["model.wte.weight"][0, 0] = float("nan")
    save_file(values | {"lm_head.weight": head}, tmp_path / "model.safetensors")
    read = filled(source_of(tmp_path, TIED, aliases=ALIASES), TIED)
    assert read.keys() == values.keys()
    assert torch.equal(read["model.wte.weight"][1:], head[1:])


def test_a_tied_copy_that_differs_is_refused(tmp_path: Path) -> None:
    values = random_values(TIED)
    head = values["model.wte.weight"].clone()
    head[10, 5] += 1
    save_file(values | {"lm_head.weight": head}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"lm_head\.weight is tied to model\.wte\.weight"):
        filled(source_of(tmp_path, TIED, aliases=ALIASES), TIED)


def test_a_tied_copy_of_another_shape_or_dtype_is_refused(tmp_path: Path) -> None:
    values = random_values(TIED)
    save_file(values | {"lm_head.weight": torch.zeros(3, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"lm_head\.weight \(3, 3\), not \(11, 6\)"):
        source_of(tmp_path, TIED, aliases=ALIASES)
    half = values["model.wte.weight"].half()
    save_file(values | {"lm_head.weight": half}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="holds other values"):
        filled(source_of(tmp_path, TIED, aliases=ALIASES), TIED)


def test_a_tied_weight_may_be_stored_under_the_heads_name_alone(tmp_path: Path) -> None:
    values = random_values(TIED)
    stored = dict(values)
    stored["lm_head.weight"] = stored.pop("model.wte.weight")
    save_file(stored, tmp_path / "model.safetensors")
    assert_same(filled(source_of(tmp_path, TIED, aliases=ALIASES), TIED), values)


@pytest.mark.parametrize("keep", [0, 4, 60, -1])
def test_a_file_that_was_cut_short_is_named(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file(random_values(SPEC), path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CorruptError, match=r"model\.safetensors is damaged or cut short"):
        source_of(tmp_path)


def test_a_file_that_is_cut_after_it_was_checked_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(random_values(SPEC), path)
    source = source_of(tmp_path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CorruptError, match=r"model\.safetensors: model\.wte\.weight cannot be"):
        filled(source, SPEC)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_a_broken_index_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CorruptError, match=r"index\.json is not an index"):
        source_of(tmp_path)


def test_a_shard_that_the_index_lists_but_is_not_there_is_named(tmp_path: Path) -> None:
    index = json.dumps({"weight_map": {"a": "model-1.safetensors"}})
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=r"model-1\.safetensors"):
        source_of(tmp_path)


def test_a_folder_of_pickles_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(ModelError, match="unpickling runs code"):
        source_of(tmp_path)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no model\*\.safetensors"):
        source_of(tmp_path)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("adapter_config.json", r"has an adapter \(LoRA\).*Merge it"),
        ("weights.safetensors", r"has weights\.safetensors, which transformers would not read"),
    ],
)
def test_what_stands_in_place_of_the_weights_is_named(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(ModelError, match=said):
        source_of(tmp_path)


def test_a_pointer_of_git_lfs_is_called_so(tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 34\n"
    (tmp_path / "model.safetensors").write_text(pointer)
    with pytest.raises(CorruptError, match=r"is a Git LFS pointer.*git lfs pull"):
        source_of(tmp_path)


def test_a_head_that_is_not_there_may_have_been_the_embeddings(tmp_path: Path) -> None:
    values = random_values(SPEC)
    del values["lm_head.weight"]
    save_file(values, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"lacks: lm_head\.weight\. If the head uses .* to true"):
        source_of(tmp_path)
    del values["model.norm.weight"]
    save_file(values, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.norm\.weight$"):
        source_of(tmp_path)


def test_an_index_cannot_name_files_outside_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "other.safetensors").write_bytes(b"")
    index = json.dumps({"weight_map": {"a": "../other.safetensors"}})
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CorruptError, match=r"\.\./other\.safetensors"):
        source_of(folder)
