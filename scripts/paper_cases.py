"""Plan the cases of the MegaTrain paper, and write what the plans say into `docs/paper.md`.

The table and the picture are those of the program as it is; `tests/test_paper.py` compares them
with what is in the folder. The sentences around the table are written by hand.

    python scripts/paper_cases.py
"""

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from megatrain_cli.cli.app import app
from megatrain_cli.units import GIB

DOCS = Path(__file__).parents[1] / "docs"
PAGE, PICTURE = DOCS / "paper.md", DOCS / "plan-14b-gh200.svg"
BEGIN, END = (
    "<!-- begin of scripts/paper_cases.py -->\n",
    "<!-- end of scripts/paper_cases.py -->\n",
)


@dataclass(frozen=True)
class Case:
    """One case.

    Attributes:
        name: For people.
        command: What plans it, without `megatrain plan`.
        reported: What the paper is reported to say of it: seconds a step, TFLOPS, memory.
        picture: Whether its picture is in the page.
    """

    name: str
    command: str
    reported: tuple[str, str, str]
    picture: bool = False


CASES = (
    Case(
        "7B, GH200, 158 rows of 1024",
        "--model qwen2.5-7b --tokens 158x1024 --machine gh200",
        ("27.05", "284.7", "GPU 74.2 GB"),
    ),
    Case(
        "7B, GH200, 6 rows of 32768",
        "--model qwen2.5-7b --tokens 6x32768 --machine gh200",
        ("32.18", "316.7", "GPU 84.0 GB"),
    ),
    Case(
        "14B, GH200, 96 rows of 1024",
        "--model qwen2.5-14b --tokens 96x1024 --machine gh200",
        ("?", "264", "?"),
        picture=True,
    ),
    Case(
        "14B, RTX 3090 with 251 GB, rows not told",
        "--model qwen2.5-14b --tokens 8x1024 --machine rtx3090-256gb",
        ("?", "30.19", "?"),
    ),
    Case(
        "120B, H200 with 1.5 TB, rows not told",
        "--model gpt-oss-120b --tokens 64x1024 --machine h200-1.5tb optimizer.master=bf16",
        ("?", "?", "it fits"),
    ),
)


def plans() -> Iterator[tuple[Case, dict[str, Any], str]]:
    """Each case with what `plan --json` says, and with its picture if the page has one."""
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "plan.svg"
            words = ["plan", *case.command.split(), "--json"]
            result = CliRunner().invoke(app, [*words, *(["--svg", str(path)] * case.picture)])
            picture = path.read_text(encoding="utf-8") if case.picture else ""
            yield case, json.loads(result.stdout), picture


def made() -> tuple[str, str]:
    """The generated part of the page, and the picture."""
    rows, commands, picture = [], [], ""
    for case, plan, drawn in plans():
        seconds, tflops, memory = case.reported
        commands.append(f"megatrain plan {case.command}\n")
        rows.append(
            f"| {case.name} | {seconds} | {plan['step_seconds']:.3g} | {tflops} "
            f"| {plan['tflops']:.3g} | {plan['tokens_per_second']:.0f} | {memory} "
            f"| {plan['verdict']}: GPU {plan['gpu_peak_bytes'] / GIB:.1f}, "
            f"host {plan['host_peak_bytes'] / GIB:.1f} |\n"
        )
        picture += drawn
    head = (
        "| case | paper, s/step | plan, s/step | paper, TFLOPS | plan, TFLOPS | plan, tokens/s "
        "| paper, memory | plan, GiB |\n|---|---|---|---|---|---|---|---|\n"
    )
    return "".join(["```\n", *commands, "```\n\n", head, *rows]), picture


def write() -> None:
    """Put both into the folder."""
    text, picture = made()
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}{text}{END}{after}", encoding="utf-8")
    PICTURE.write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    write()
