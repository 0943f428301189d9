"""Every shipped config loads without a remark, and fits the machine that its name and text promise.

The models are written out here by their published sizes, so nothing is fetched; the parameter
counts are those on their model cards.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from megatrain_cli.config.load import dump_config, load_config
from megatrain_cli.model.layout import make_layout
from megatrain_cli.model.spec import LayerSpec, ModelSpec, ParamSpec
from megatrain_cli.plan.decide import Known
from megatrain_cli.plan.machine import MachineSpec
from megatrain_cli.plan.plan import RunPlan, make_plan
from megatrain_cli.units import GIB

FOLDER = Path(__file__).parents[1] / "configs"
CONFIGS = sorted(FOLDER.glob("*.yaml"))
every_config = pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)

# What the system and other programs hold of a machine's RAM.
SYSTEM_BYTES = 4 * GIB


@dataclass(frozen=True)
class Decoder:
    """A Llama-like decoder by its numbers, as in the model's config.json."""

    parameters: int
    hidden: int
    feed_forward: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    qkv_bias: bool
    tied: bool

    def spec(self) -> ModelSpec:
        """Names do not matter for sizes; shapes do."""
        width, kv = self.hidden, self.hidden // self.heads * self.kv_heads
        shapes: dict[str, tuple[int, ...]] = {
            "q": (width, width),
            "k": (kv, width),
            "v": (kv, width),
            "o": (width, width),
            "gate": (self.feed_forward, width),
            "up": (self.feed_forward, width),
            "down": (width, self.feed_forward),
            "norm_1": (width,),
            "norm_2": (width,),
        }
        if self.qkv_bias:
            shapes |= {"q_bias": (width,), "k_bias": (kv,), "v_bias": (kv,)}
        embedding = ParamSpec("embedding", (self.vocab, width))
        head = () if self.tied else (ParamSpec("lm_head", (self.vocab, width)),)
        decoder_layers = (
            LayerSpec(f"layer-{i:05d}", "decoder", tuple(ParamSpec(*p) for p in shapes.items()))
            for i in range(self.layers)
        )
        return ModelSpec(
            architecture="",
            hidden_size=width,
            vocab_size=self.vocab,
            layers=(
                LayerSpec("embed", "embed", (embedding,)),
                *decoder_layers,
                LayerSpec("head", "head", (ParamSpec("norm", (width,)), *head)),
            ),
            tied=("embedding",) if self.tied else (),
            has_dropout=False,
            max_positions=None,
            num_heads=self.heads,
        )


MODELS = {
    "qwen2.5-3b": Decoder(3_085_938_688, 2048, 11008, 36, 16, 2, 151_936, True, True),
    "qwen2.5-7b": Decoder(7_615_616_512, 3584, 18944, 28, 28, 4, 152_064, True, False),
    "llama-3.1-8b": Decoder(8_030_261_248, 4096, 14336, 32, 32, 8, 128_256, False, False),
    "qwen2.5-14b": Decoder(14_770_033_664, 5120, 13824, 48, 40, 8, 152_064, True, False),
}
SIZED = [path for path in CONFIGS if re.search(r"-\d+g$", path.stem)]
every_sized_config = pytest.mark.parametrize("path", SIZED, ids=lambda path: path.stem)


def plan_on(path: Path, host_bytes: int, device_bytes: int, *, can_pin: bool) -> RunPlan:
    spec = MODELS[path.stem.rpartition("-")[0]].spec()
    layouts = tuple(make_layout(layer) for layer in spec.layers)
    machine = MachineSpec(host_bytes, "the name", 16, "cuda:0", "a GPU", device_bytes)
    return make_plan(load_config(path).config, spec, layouts, machine, Known(can_pin=can_pin))


def promised_bytes(path: Path) -> tuple[int, int]:
    """Host RAM by the file's name and GPU memory by its first lines; both in decimal GB."""
    ram = int(path.stem.rpartition("-")[2].removesuffix("g"))
    gpu = re.search(r"a GPU with (\d+) GB", path.read_text(encoding="utf-8"))
    assert gpu is not None
    return ram * 10**9 - SYSTEM_BYTES, int(gpu[1]) * 10**9


@every_config
def test_a_shipped_config_loads_and_has_nothing_to_remark(path: Path) -> None:
    assert load_config(path).notes == ()


@every_config
def test_a_shipped_config_round_trips(path: Path, tmp_path: Path) -> None:
    config = load_config(path).config
    copy = tmp_path / "config.yaml"
    copy.write_text(dump_config(config), encoding="utf-8")
    assert load_config(copy).config == config


@every_config
def test_a_shipped_config_reads_and_writes_beside_its_folder(path: Path) -> None:
    config = load_config(path).config
    root = FOLDER.parent.resolve()
    for file in (config.model.path, config.train.output_dir, *(s.path for s in config.data.train)):
        assert file.is_relative_to(root)
    assert config.train.output_dir == root / "runs" / path.stem


@every_config
def test_every_setting_of_a_shipped_config_is_one_that_its_schema_keeps(path: Path) -> None:
    written = yaml.safe_load(path.read_text(encoding="utf-8"))
    keys = {f"{section}.{key}" for section, values in written.items() for key in values}
    assert load_config(path).explicit == keys


@pytest.mark.parametrize("name", MODELS)
def test_the_sizes_are_those_of_the_published_models(name: str) -> None:
    assert MODELS[name].spec().num_parameters == MODELS[name].parameters


@every_sized_config
@pytest.mark.parametrize("can_pin", [True, False], ids=["page-locked", "pageable"])
def test_a_config_fits_the_ram_of_its_name_and_the_gpu_of_its_text(
    path: Path, can_pin: bool
) -> None:
    host_bytes, device_bytes = promised_bytes(path)
    assert plan_on(path, host_bytes, device_bytes, can_pin=can_pin).shortfalls == ()


@every_sized_config
def test_a_config_takes_14_bytes_of_ram_a_parameter_and_its_buffers(path: Path) -> None:
    plan = plan_on(path, *promised_bytes(path), can_pin=True)
    state = 14 * MODELS[path.stem.rpartition("-")[0]].parameters
    regions = ("weights", "gradients", "master remainders", "first moments", "second moments")
    billed = sum(line.num_bytes for line in plan.lines if line.owner in regions)
    assert state <= billed <= state * 1.001
    # The program, what was seen to grow with tokens, and chunks between tiles and disk.
    assert plan.host_bytes - billed - plan.decisions.pool_bytes < 8 * GIB


@every_sized_config
def test_a_config_tells_the_disk_that_its_checkpoints_take(path: Path) -> None:
    plan = plan_on(path, *promised_bytes(path), can_pin=True)
    text = path.read_text(encoding="utf-8")
    told = re.findall(r"One checkpoint is ([\d.]+) GB|folder holds up to ([\d.]+) GB", text)
    sizes = (plan.checkpoint_bytes, plan.folder_bytes)
    assert ["".join(found) for found in told] == [f"{size / 1e9:.1f}" for size in sizes]


@every_sized_config
def test_half_the_ram_is_refused_with_what_is_missing(path: Path) -> None:
    host_bytes, device_bytes = promised_bytes(path)
    [shortfall] = plan_on(path, host_bytes // 2, device_bytes, can_pin=True).shortfalls
    assert "of host RAM" in shortfall
    assert "missing" in shortfall
