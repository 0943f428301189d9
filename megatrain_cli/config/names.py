"""What a user most likely meant by a key or a word that is not known."""

import difflib
import types
import typing
from collections.abc import Iterable

from megatrain_cli.config.aliases import ALIASES
from megatrain_cli.config.kinds import Wanted
from megatrain_cli.config.schema import DataSource, KeepLayers, Section, TrainConfig

SECTIONS: dict[str, type[Section]] = {
    name: typing.cast("type[Section]", field.annotation)
    for name, field in TrainConfig.model_fields.items()
}
"""Section name -> its class."""


def _annotations(section: type[Section]) -> dict[str, object]:
    hints = typing.get_type_hints(section, include_extras=True)
    return {leaf: hints[leaf] for leaf in section.model_fields}


KEYS: dict[str, object] = {
    f"{name}.{leaf}": annotation
    for name, section in SECTIONS.items()
    for leaf, annotation in _annotations(section).items()
}
"""Every dotted key -> its annotation."""

NESTED: dict[str, dict[str, object]] = {
    "data.train": _annotations(DataSource),
    "data.eval": _annotations(DataSource),
    "pipeline.activations": _annotations(KeepLayers),
}
"""Keys that hold mappings of their own -> the keys of those mappings."""

_LEAVES: dict[str, list[str]] = {}
for _key in KEYS:
    _LEAVES.setdefault(_key.partition(".")[2], []).append(_key)

# Words for one value that are close in meaning, not in spelling.
_SAME_WORD = {
    "bf16": "bfloat16",
    "fp32": "float32",
    "full": "keep",
    "adamw_bf16": "bf16",
    "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
    "jsonl": "auto",
    "json": "auto",
    "chat": "messages",
    "gpu": "cuda",
    "yes": "true",
    "on": "true",
    "no": "false",
    "off": "false",
    "none": "null",
}


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known word that looks most like `word`, if one does."""
    found = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=cutoff)
    return found[0] if found else None


def suggest_key(section: str | None, name: str) -> tuple[str | None, str]:
    """What to say about an unknown key `name` in `section` (None: at the top of the file).

    Returns:
        The dotted key (or section) that was most likely meant, and the message.
    """
    if section is None and name in KEYS:
        parent, _, leaf = name.partition(".")
        return name, f"write `{leaf}` on a line of its own below `{parent}:`"
    own = SECTIONS[section].model_fields if section is not None else ()
    longer = [leaf for leaf in own if leaf.endswith(f"_{name}")]
    if longer and name not in ALIASES:  # of `train.steps`, not `eval.steps`
        meant = f"{section}.{longer[0]}" if len(longer) == 1 else None
        return meant, f"unknown key. Did you mean {' or '.join(f'`{leaf}`' for leaf in longer)}?"
    if name in _LEAVES:
        places = _LEAVES[name]
        where = " or ".join(f"`{key}`" for key in places)
        return places[0] if len(places) == 1 else None, f"not here; it belongs at {where}"
    if name in ALIASES:
        tool, key = ALIASES[name]
        return key, f"unknown key; this is {tool}'s name for `{key}`"
    if section is None:
        found = nearest(name, [*SECTIONS, *_LEAVES], cutoff=0.65)
        if found in SECTIONS:
            return found, f"unknown section. Did you mean `{found}`?"
    else:
        found = nearest(name, SECTIONS[section].model_fields)
        if found:
            return f"{section}.{found}", f"unknown key. Did you mean `{found}`?"
        found = nearest(name, _LEAVES, cutoff=0.75)
    if found:
        key = _LEAVES[found][0]
        return key, f"unknown key. Did you mean `{key}`?"
    known = SECTIONS if section is None else SECTIONS[section].model_fields
    kind = "section" if section is None else "key"
    return None, f"unknown {kind}. Known here: {', '.join(known)}"


def words(annotation: object) -> tuple[str, ...]:
    """The fixed words that a value of this kind may be, as they are written in YAML."""
    if typing.get_origin(annotation) is typing.Literal:
        return tuple(str(word) for word in typing.get_args(annotation))
    if annotation is bool:
        return ("true", "false")
    if annotation is types.NoneType:
        return ("null",)
    args = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Annotated:
        return words(args[0])
    if typing.get_origin(annotation) in {typing.Union, types.UnionType}:
        return tuple(word for arg in args for word in words(arg))
    return ()


def wanted(annotation: object) -> str:
    """What a value of this kind looks like, in words."""
    *first, last = _forms(annotation)
    return f"{', '.join(first)} or {last}" if first else last


def _forms(annotation: object) -> list[str]:
    for mark in getattr(annotation, "__metadata__", ()):
        if isinstance(mark, Wanted):
            return [mark.text]
    if typing.get_origin(annotation) in {typing.Union, types.UnionType}:
        return [form for arg in typing.get_args(annotation) for form in _forms(arg)]
    return [f"`{word}`" for word in words(annotation)]


def suggest_word(value: object, annotation: object) -> str | None:
    """The fixed word that was most likely meant by a wrong value."""
    if not isinstance(value, str):
        return None
    known = words(annotation)
    same = _SAME_WORD.get(value.lower().removeprefix("torch."))
    return same if same in known else nearest(value, known)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A sentence with a space behind it: up to three names that are near; empty without any."""
    found = difflib.get_close_matches(word, list(known), n=3)
    return f"Did you mean {', '.join(found)}? " if found else ""
