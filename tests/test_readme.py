"""README tells the truth: its commands, files, keys, codes and numbers are those of the program."""

import re
from itertools import takewhile
from pathlib import Path

import pytest

from megatrain_cli.cli.app import app
from megatrain_cli.config.load import load_config
from megatrain_cli.errors import MegatrainError
from megatrain_cli.model.layout import make_layout
from megatrain_cli.model.shapes import find_shape, known_shapes
from megatrain_cli.model.spec import LayerSpec, ParamSpec
from megatrain_cli.plan.memory import CPU_LATER_BYTES, CPU_PROGRAM_BYTES, CUDA_PROGRAM_BYTES
from megatrain_cli.plan.profiles import known_profiles
from megatrain_cli.plan.tiles import MasterMode, TileFormat, store_bytes
from tests.test_configs import MODELS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def blocks(language: str = "") -> list[str]:
    """The fenced blocks of README in one language."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [text for found, text in fenced if found == language]


def table_rows(first_cell: str) -> list[list[str]]:
    """Cells of the table whose header begins with `first_cell`."""
    _, _, rest = README.partition(f"| {first_cell} |")
    assert rest, f"no table of {first_cell}"
    lines = takewhile(lambda line: line.startswith("|"), rest.splitlines()[2:])
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_make_target_it_names_exists() -> None:
    named = set(re.findall(r"(?:^|`)make ([a-z]+)", README, re.MULTILINE))
    assert {"demo", "test", "setup", "gpu"} <= named
    assert sorted(named - set(re.findall(r"^([a-z]+):", MAKEFILE, re.MULTILINE))) == []


def test_it_names_every_command_and_no_other() -> None:
    commands = {c.name or getattr(c.callback, "__name__", "") for c in app.registered_commands}
    commands |= {group.name or "" for group in app.registered_groups}
    assert set(re.findall(r"(?:^|`)megatrain ([a-z-]+)", README, re.MULTILINE)) == commands


def test_its_config_loads_without_a_remark(tmp_path: Path) -> None:
    [snippet] = blocks("yaml")
    path = tmp_path / "config.yaml"
    path.write_text(snippet, encoding="utf-8")
    assert load_config(path).notes == ()


def test_its_file_map_is_the_repository() -> None:
    [tree] = [block for block in blocks() if block.startswith("megatrain_cli/")]
    named: set[Path] = set()
    for line in tree.splitlines():
        name, gloss = line.split(maxsplit=1)
        path = ROOT / "megatrain_cli" / name if line.startswith(" ") else ROOT / name
        assert path.is_dir() if name.endswith("/") else path.is_file(), name
        assert len(gloss.split()) <= 7, gloss
        named.add(path)
    package = ROOT / "megatrain_cli"
    parts = {p for p in package.iterdir() if (p / "__init__.py").is_file()}
    parts |= {p for p in package.glob("*.py") if not p.name.startswith("__")}
    assert sorted(p.name for p in parts - named) == []


def test_its_exit_codes_are_those_of_the_errors() -> None:
    listed = {int(code) for code, _ in table_rows("Exit code")}
    assert listed == {0, 2, 130} | {MegatrainError.exit_code} | {
        error.exit_code for error in MegatrainError.__subclasses__()
    }


@pytest.mark.parametrize("row", table_rows("`optimizer.master`"), ids=lambda row: row[0])
def test_its_bytes_a_parameter_are_those_of_the_tiles(row: list[str]) -> None:
    masters: list[str] = re.findall(r"`(\w+)`", row[0])
    keep_gradient = "deferred" in row[1]
    numel = 1 << 22
    layout = make_layout(LayerSpec("layer", "", (ParamSpec("weight", (numel,)),)))
    for master in masters:
        regions = store_bytes([layout], TileFormat("bfloat16", _mode(master), keep_gradient))
        per = {name: num_bytes // numel for name, num_bytes in regions.items()}
        found = [
            per["weights"],
            per.get("remainder", 0) + per.get("master", 0),
            per.get("gradient", 0),
            per["exp_avg"] + per["exp_avg_sq"],
        ]
        assert [int(cell) for cell in row[2:]] == [*found, sum(found)]


def _mode(name: str) -> MasterMode:
    modes: dict[str, MasterMode] = {
        "fp32_split": "fp32_split",
        "bf16": "bf16",
        "bf16_stochastic": "bf16_stochastic",
        "fp32": "fp32",
    }
    return modes[name]


@pytest.mark.parametrize("row", table_rows("Model"), ids=lambda row: row[0])
def test_its_model_sizes_are_multiplied_right(row: list[str]) -> None:
    name, parameters, at_14, at_12, config = row
    assert int(parameters.replace(",", "")) == MODELS[name.lower()].parameters
    for cell, width in ((at_14, 14), (at_12, 12)):
        assert cell == f"{MODELS[name.lower()].parameters * width / 1e9:.1f} GB"
    assert config.startswith(f"`configs/{name.lower()}-")


def test_its_round_sizes_are_14_bytes_a_parameter() -> None:
    pairs = re.findall(r"(\d+) billion(?: parameters are)? (\d+) GB", README)
    assert len(pairs) == 3
    assert [int(gb) for _, gb in pairs] == [14 * int(billions) for billions, _ in pairs]


def test_what_the_program_takes_besides_is_what_the_plan_bills() -> None:
    [(on_cpu, on_gpu)] = re.findall(r"program \(([\d.]+) GB, ([\d.]+) GB beside a GPU\)", README)
    assert on_cpu == f"{(CPU_PROGRAM_BYTES + CPU_LATER_BYTES) / 1e9:.1f}"
    assert on_gpu == f"{CUDA_PROGRAM_BYTES / 1e9:.1f}"


def test_it_counts_the_models_and_machines_that_are_known_by_name() -> None:
    words = " ".join(README.split())
    [(models, mixtures)] = re.findall(
        r"one of (\d+) published models, (\d+) of them mixtures of experts", words
    )
    shapes = [find_shape(name) for name in known_shapes()]
    assert int(models) == len(shapes)
    assert int(mixtures) == sum(shape.active is not None for shape in shapes)
    [machines] = re.findall(r"`--machine` one of (\d+) machines", words)
    assert int(machines) == len(known_profiles())


def test_the_architectures_it_names_are_the_proved_ones() -> None:
    from megatrain_cli.model.discover import PROVED

    [sentence] = re.findall(r"^Models: (.*?)\. There", README, re.MULTILINE | re.DOTALL)
    families = {re.sub(r"(For|LMHead).*", "", name).lower() for name in PROVED}
    named = {re.sub(r"\W", "", word).lower() for word in re.findall(r"[A-Z][\w.-]+", sentence)}
    assert families <= named
    assert named - families == {"smollm2", "qwen25"}


def test_the_torch_it_names_is_the_one_that_setup_installs() -> None:
    [wanted] = re.findall(r"torch==([\d.]+)", MAKEFILE)
    assert set(re.findall(r"torch (\d[\d.]*\d)", README)) == {wanted}


def test_no_file_names_a_machine_or_a_package_host() -> None:
    # Bracketed letters keep this file from being found by its own patterns.
    traces = re.compile(
        r"(?<![\w.])/(?:wor[k]|hom[e]|roo[t]|User[s])/|pypi[.]or[g]|pythonhoste[d]|index-ur[l]"
        r"|PIP_INDE[X]|artifactor[y]|registry[.]np[m]|127[.]0[.]0[.]1|localhos[t]"
    )
    folders = ("megatrain_cli", "tests", "scripts", "configs", "docs", ".ci")
    files = [p for folder in folders for p in (ROOT / folder).rglob("*") if p.is_file()]
    files += [p for p in ROOT.iterdir() if p.is_file() and p.name != ".git"]
    found = []
    for path in files:
        if "__pycache__" in path.parts or path.name.startswith(".coverage"):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}: {hit}" for hit in traces.findall(text)]
    assert found == []
