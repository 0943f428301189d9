"""The README of an exported model: what it was made from, how it was trained, how the loss fell."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

import yaml

from megatrain_cli.report.loss_chart import loss_chart
from megatrain_cli.units import show_count

_SHOWN_LOSSES = 10


@dataclass(frozen=True)
class CardFacts:
    """What a model card tells.

    Attributes:
        name: Of the exported folder.
        architecture: Class of the model in transformers.
        num_parameters: All of them were trained.
        dtype: Of the exported weights, such as `bfloat16`.
        step: Optimizer steps made.
        target_steps: Steps that the run was to make.
        num_rows: Rows of data seen, over all epochs.
        config: The run's config, section by section.
        losses: Step and loss of the run's steps, in order; empty if they are not known.
        checkpoint_id: Pins every byte of the checkpoint that was exported.
    """

    name: str
    architecture: str
    num_parameters: int
    dtype: str
    step: int
    target_steps: int
    num_rows: int
    config: Mapping[str, Mapping[str, object]]
    losses: Sequence[tuple[int, float]]
    checkpoint_id: str


def model_card(facts: CardFacts) -> str:
    """The card as Markdown, with the front matter that model hubs read. It names no place on disk.

    Text from the run's files stands in a table or a block of code, where it is no markup.
    """
    config = without_places(facts.config)
    base = str(config.get("model", {}).get("path", "an unnamed model"))
    head: dict[str, object] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if base.count("/") == 1:  # the id of a model on a hub
        head["base_model"] = base
    rows = [
        ("base model", base),
        ("architecture", facts.architecture),
        ("parameters", f"{show_count(facts.num_parameters)}, all of them trained"),
        ("weights", facts.dtype),
        ("optimizer steps", f"{facts.step} of {facts.target_steps}"),
        ("rows seen", str(facts.num_rows)),
        ("made from checkpoint", facts.checkpoint_id),
    ]
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=True)}---\n",
        f"# {_plain(facts.name)}\n",
        "| | |\n|---|---|\n" + "".join(f"| {key} | {_code(value)} |\n" for key, value in rows),
        "## Training config\n",
        _block(yaml.safe_dump(config, sort_keys=False, allow_unicode=True), "yaml"),
    ]
    chart = loss_chart(facts.losses)
    if chart:
        table = "".join(f"| {step} | {loss:.4f} |\n" for step, loss in _sample(facts.losses))
        parts += ["## Loss\n", _block(chart), "| step | loss |\n|---:|---:|\n" + table]
    return "\n".join(parts)


def without_places(
    config: Mapping[str, Mapping[str, object]],
) -> dict[str, dict[str, object]]:
    """A config in which paths are names: a card is for others, and tells nothing of our disks.

    The output folder is left out; so are values that were never set.
    """
    sections: dict[str, dict[str, object]] = {}
    for section, values in config.items():
        shown = {
            key: _named(value)
            for key, value in values.items()
            if value is not None and (section, key) != ("train", "output_dir")
        }
        if shown:
            sections[section] = shown
    return sections


def _named(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _named(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_named(item) for item in value]
    if isinstance(value, str) and PurePath(value).is_absolute():
        return PurePath(value).name
    return value


def _sample(losses: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """The first, the last, and some between them, evenly."""
    last = len(losses) - 1
    places = {round(i * last / (_SHOWN_LOSSES - 1)) for i in range(_SHOWN_LOSSES)}
    return [losses[place] for place in sorted(places)]


def _plain(text: str) -> str:
    written = text.encode(errors="replace").decode()  # the name of a folder may be no Unicode
    return " ".join(written.split()).replace("<", "&lt;")


def _code(text: str) -> str:
    return "`" + " ".join(text.split()).replace("`", "'").replace("|", "/") + "`"


def _block(text: str, language: str = "") -> str:
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}\n"
