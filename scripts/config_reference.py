"""Write `docs/config.md` from the schema: every key, its default, what it takes and what it does.

The sentences are the schema's own, and what this version refuses is found by asking it, so the
page cannot drift from the program. `tests/test_docs.py` compares it with what is in the folder.

    python scripts/config_reference.py
"""

import json
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megatrain_cli.config.aliases import ALIASES
from megatrain_cli.config.later import find_not_yet
from megatrain_cli.config.names import KEYS, NESTED, SECTIONS, wanted, words
from megatrain_cli.config.schema import DataSource, KeepLayers, TrainConfig

PAGE = Path(__file__).parents[1] / "docs" / "config.md"

# The classes behind `NESTED`, and how their keys are written in YAML.
_NESTED_CLASSES: dict[str, tuple[type[BaseModel], str]] = {
    "data.train": (DataSource, "data.train[]"),  # as of `data.eval`
    "pipeline.activations": (KeepLayers, "pipeline.activations"),
}

_INTRO = """\
# Config reference

<!-- Written by scripts/config_reference.py from megatrain_cli/config/schema.py. Change those. -->

A run is one YAML file with the sections below. Required are `model.path`, `data.train`,
`train.output_dir`, and one of `train.max_steps` and `train.num_epochs`; everything else has a
default.

- Any key can be changed on the command line: `train.max_steps=5`, `--train.max_steps 5` or
  `--train.max-steps 5`. Values are read as YAML and checked like those of the file.
- Relative paths start at the folder of the config file, wherever the command is run. A leading `~`
  is the home folder, `${NAME}` an environment variable; one without a value is an error. `$$`
  stands for `$` itself.
- YAML is read by version 1.2: `1e-5` is a number and `no` is a text.
- Kinds are strict: `"4"` is not 4 and `true` is not 1. `2e5` may stand for a whole number.
- Unknown, doubled and misplaced keys are errors, all reported at once as `file:line: key: problem`.
- A key that was set and does nothing in its surroundings is said aloud, once, as a note.

**Not yet** marks values that the format has and this version refuses by name.
"""

_ALIASES_INTRO = """\
## Names from other tools

They are refused, and the message names the key that is meant: two names for one thing would make
configs harder to compare, and some meanings differ in a detail.
"""


def reference() -> str:
    """The whole page."""
    refused = _refusals()
    parts = [_INTRO]
    for name, section in SECTIONS.items():
        parts.append(f"## {name}\n\n{TrainConfig.model_fields[name].description}\n")
        rows = [("Key", "Default", "Takes", "What it does")]
        for leaf, field in section.model_fields.items():
            key = f"{name}.{leaf}"
            rows.append(_row(key, field, KEYS[key], refused.get(key, [])))
            if key in _NESTED_CLASSES:
                inner, shown = _NESTED_CLASSES[key]
                for part, inner_field in inner.model_fields.items():
                    rows.append(_row(f"{shown}.{part}", inner_field, NESTED[key][part], []))
        parts.append(_table(rows))
    parts.append(_ALIASES_INTRO)
    parts.append(_table([("Here", "Elsewhere"), *_other_names()]))
    return "\n".join(parts)


def _other_names() -> list[tuple[str, ...]]:
    """Each key with the names that other tools have for it, in the schema's order."""
    names: dict[str, list[str]] = {key: [] for key in KEYS}
    for name, (tool, key) in sorted(ALIASES.items(), key=lambda item: (item[1][0], item[0])):
        names[key].append(f"`{name}` ({tool})")
    return [(f"`{key}`", ", ".join(found)) for key, found in names.items() if found]


def _row(
    key: str, field: FieldInfo, annotation: object, refused: list[str]
) -> tuple[str, str, str, str]:
    default = "required" if field.is_required() else f"`{_show(field.get_default())}`"
    does = " ".join((field.description or "").split())
    if refused:
        does += f" **Not yet**: {'. '.join(refused)}."
    return f"`{key}`", default, wanted(annotation), does


def _show(value: object) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value)


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join(lines) + "\n"


def _refusals() -> dict[str, list[str]]:
    """What `later.py` says when each key is given each value that it could be given."""
    found: dict[str, list[str]] = {}
    for key, annotation in KEYS.items():
        for value in _samples(key, annotation):
            for finding in find_not_yet(_config_with(key, value)):
                messages = found.setdefault(finding.key, [])
                if finding.message not in messages:
                    messages.append(finding.message)
    return found


def _samples(key: str, annotation: object) -> Iterator[object]:
    """Values that stand for all a key can be set to."""
    if key == "data.train":
        for word in words(NESTED[key]["format"]):
            yield [{"path": "rows.jsonl", "format": None if word == "null" else word}]
        yield [{"path": "rows.jsonl", "weight": 2.0}]
        return
    literal = {"true": True, "false": False, "null": None}
    for word in words(annotation):
        yield literal.get(word, word)
    if _takes(annotation, int):
        yield 3
    if _takes(annotation, Path):
        yield "rows.jsonl"


def _takes(annotation: object, kind: type) -> bool:
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _takes(typing.get_args(annotation)[0], kind)
    if origin in {typing.Union, types.UnionType}:
        return any(_takes(arg, kind) for arg in typing.get_args(annotation))
    return annotation is kind


def _config_with(key: str, value: object) -> TrainConfig:
    sections: dict[str, dict[str, object]] = {
        "model": {"path": "model"},
        "data": {"train": "rows.jsonl"},
        "train": {"output_dir": "run"},
    }
    section, _, leaf = key.partition(".")
    sections.setdefault(section, {})[leaf] = value
    return TrainConfig.model_validate(sections)


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
    print(f"wrote {PAGE}")
