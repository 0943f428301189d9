"""The pages of `docs/` and CONTRIBUTING say what the program says."""

import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from megatrain_cli.config.changes import CLASSES, KINDS
from megatrain_cli.config.names import KEYS
from megatrain_cli.pipeline.breakdown import Breakdown
from megatrain_cli.pipeline.hazards import EVENT_NAMES
from megatrain_cli.pipeline.ops import Kind, Lane
from megatrain_cli.report.records import StepRecord
from scripts.config_reference import PAGE, reference

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "CONTRIBUTING.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
CHECKPOINTS = ROOT / "docs" / "checkpoints.md"
CHECKPOINT_FORMAT = ROOT / "docs" / "checkpoint-format.md"
TEMPLATES = ROOT / "docs" / "templates.md"
DATA = ROOT / "docs" / "data.md"
PAPER = ROOT / "docs" / "paper.md"
FAILURES = ROOT / "docs" / "failure-modes.md"
PAGES = (
    ROOT / "README.md",
    GUIDE,
    ARCHITECTURE,
    BENCHMARKS,
    CHECKPOINTS,
    CHECKPOINT_FORMAT,
    FAILURES,
    DATA,
    TEMPLATES,
    PAPER,
    PAGE,
)

SOURCES = sorted((ROOT / "megatrain_cli").rglob("*.py"))
WORDS = set(re.findall(r"\w+", "\n".join(path.read_text(encoding="utf-8") for path in SOURCES)))


def code_words(text: str) -> set[str]:
    """What stands in backticks and looks like one name of the program."""
    spans = re.findall(r"`([^`\n]+)`", text)
    return {span for span in spans if re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*[A-Za-z0-9]", span)}


def section(text: str, title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None, f"no section `{title}`"
    return found[1]


def test_the_config_reference_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference(), "run scripts/config_reference.py"


def test_the_config_reference_names_every_key_and_every_refusal() -> None:
    page = reference()
    assert [key for key in KEYS if f"| `{key}` |" not in page] == []
    # The parts that this version names as missing, in `config/later.py`.
    for key in ("model.trust_remote_code", "logging.tensorboard"):
        first = next(line for line in page.splitlines() if line.startswith(f"| `{key}` |"))
        assert "**Not yet**" in first


def test_every_word_of_the_vocabulary_is_a_word_of_the_code() -> None:
    vocabulary = code_words(section(GUIDE.read_text(encoding="utf-8"), "Vocabulary"))
    assert len(vocabulary) > 40
    assert sorted(vocabulary - WORDS) == []


def test_the_kinds_of_op_the_lanes_and_the_events_told_are_those_of_the_code() -> None:
    vocabulary = section(GUIDE.read_text(encoding="utf-8"), "Vocabulary")
    [(kinds, lanes)] = re.findall(
        r"^Kinds of op: (.*?)\. Lanes: (.*?)\.$", vocabulary, re.MULTILINE | re.DOTALL
    )
    assert re.findall(r"`(\w+)`", kinds) == list(Kind)
    assert re.findall(r"`(\w+)`", lanes) == list(Lane)
    _, _, events = vocabulary.partition("| Event |")
    told = re.findall(r"^\| (`.*`) \|", events, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", " ".join(told))) == set(EVENT_NAMES.values())


def test_the_layers_told_are_those_that_are_checked() -> None:
    """CONTRIBUTING against the contract of import-linter, which is the one that is checked."""
    [told] = re.findall(r"```\n(cli\n.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    [layers] = [
        one["layers"] for one in contract["tool"]["importlinter"]["contracts"] if "layers" in one
    ]
    assert told.splitlines() == layers


def test_every_name_in_the_architecture_page_is_a_name_of_the_code() -> None:
    names = code_words(ARCHITECTURE.read_text(encoding="utf-8"))
    # Names of torch and of the CUDA runtime, and one of a kind of machine's system call.
    foreign = {"ModuleList", "MADV_HUGEPAGE", "embed", "head"}
    assert sorted(names - WORDS - foreign) == []


def test_the_architecture_page_tells_every_number_of_a_step() -> None:
    told = code_words(section(ARCHITECTURE.read_text(encoding="utf-8"), "Where a step's time goes"))
    names = [f.name for kind in (StepRecord, Breakdown) for f in fields(kind)]
    assert [name for name in names if name not in told] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_links_that_a_page_names_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in link]
    missing = [link for link in links if not (page.parent / link).exists()]
    top = r"(?:megatrain_cli|tests|scripts|configs|docs)"
    files = re.findall(rf"`({top}/[\w./-]+\.(?:py|md|yaml))`", text)
    missing += [name for name in files if not (ROOT / name).is_file()]
    for name in re.findall(rf"`({top}/[\w/-]*/)`", text):
        # Tests mirror the package, so a folder of tests may be named for every part of it.
        part = ROOT / name.replace("tests/", "megatrain_cli/")
        missing += [] if (ROOT / name).is_dir() or part.is_dir() else [name]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_dotted_config_keys_that_a_page_names_exist(page: Path) -> None:
    sections = "|".join(sorted({key.partition(".")[0] for key in KEYS}))
    named = set(
        re.findall(rf"`((?:{sections})\.[a-z_]+)(?:: [^`]*)?`", page.read_text(encoding="utf-8"))
    )
    files = {name for name in named if name.endswith((".py", ".md", ".yaml"))}
    assert sorted(named - files - set(KEYS)) == []


def test_every_failure_has_a_row_with_a_test_that_exists_or_a_reason() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in FAILURES.read_text(encoding="utf-8").splitlines()
        if re.match(r"\| F\d", line)
    ]
    assert [row[0].strip("| ") for row in rows] == [f"F{number:02}" for number in range(1, 85)]
    missing = []
    for name, _, _, proof in rows:
        tests = re.findall(r"`([\w/]+\.py)::(\w+)`", proof)
        assert tests or "no test" in proof, name
        missing += [f"{file}::{test}" for file, test in tests if not _has_test(file, test)]
    assert missing == []


def _has_test(file: str, test: str) -> bool:
    path = ROOT / "tests" / file
    return path.is_file() and f"def {test}(" in path.read_text(encoding="utf-8")


def test_the_table_of_changes_on_resume_is_that_of_the_code() -> None:
    """`docs/checkpoints.md` against `config/changes.py`."""
    text = section(CHECKPOINTS.read_text(encoding="utf-8"), "What may change")
    for kind in KINDS:
        [row] = re.findall(rf"^\| {kind} \|.*\| (.*) \|$", text, re.MULTILINE)
        assert re.findall(r"`([\w.]+)`", row) == [k for k, v in CLASSES.items() if v == kind]


def test_the_fingerprint_told_is_that_of_the_code() -> None:
    """`docs/checkpoints.md` against the keys that `train/numerics.py` makes."""
    source = (ROOT / "megatrain_cli" / "train" / "numerics.py").read_text(encoding="utf-8")
    keys = re.findall(r"^        \"(\w+)\": ", source, re.MULTILINE)
    told = section(CHECKPOINTS.read_text(encoding="utf-8"), "Bit for bit")
    rows = [line for line in told.splitlines() if line.startswith("| ")]
    assert set(re.findall(r"`(\w+)`", "\n".join(rows))) == set(keys)
    assert len(keys) > 15
