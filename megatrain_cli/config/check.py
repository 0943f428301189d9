"""From a tree of located values to a `TrainConfig`, or to every problem with its place."""

from collections.abc import Iterable
from dataclasses import replace

from pydantic import ValidationError

from megatrain_cli.config.kinds import MAX_INT
from megatrain_cli.config.later import find_not_yet
from megatrain_cli.config.names import (
    KEYS,
    NESTED,
    SECTIONS,
    nearest,
    suggest_key,
    suggest_word,
    wanted,
)
from megatrain_cli.config.rules import Finding, find_conflicts
from megatrain_cli.config.schema import TrainConfig
from megatrain_cli.config.tree import Located

# Stand-ins let the rules look at the rest of a config whose required keys are missing or wrong.
_STAND_INS = {"model.path": ".", "data.train": ".", "train.output_dir": "."}

Path = tuple[str | int, ...]
"""Keys and list positions from the top of the file, such as `("data", "train", 1, "format")`."""


class Checker:
    """Checks one tree. `problems` grows; a key that is wrong is looked at by no further rule."""

    def __init__(self, where: str) -> None:
        """Begin with nothing wrong; `where` is the file, for what stands nowhere in it."""
        self.problems: list[str] = []
        self._where = where
        self._wrong: set[str] = set()

    def refuse(self, where: str, key: str, message: str) -> None:
        """Note a problem, and that the key cannot be relied on."""
        self.problems.append(f"{where}: {key}: {message}")
        self._wrong.add(".".join(key.partition("[")[0].split(".")[:2]))

    def drop_unknown(self, root: dict[str, Located]) -> dict[str, Located]:
        """Known sections and keys only; the others are refused.

        A misspelled section is read under its right name, so that mistakes below it show too.
        """
        sections = {name: node for name, node in root.items() if name in SECTIONS}
        for name in [name for name in root if name not in SECTIONS]:
            meant = self._refuse_unknown(root[name], None, name)
            misread = root[name]
            if meant in SECTIONS and isinstance(misread.value, dict):
                right = sections.get(meant, misread)
                if isinstance(right.value, dict):
                    sections[meant] = replace(right, value={**misread.value, **right.value})
        return {name: self._known_part(name, node) for name, node in sections.items()}

    def validate(self, root: dict[str, Located], explicit: frozenset[str]) -> TrainConfig:
        """Check values, then rules, over a tree of known keys.

        Returns:
            The config. Where `problems` is not empty it is a stand-in, fit for nothing.
        """
        data = {name: {} for name in SECTIONS} | {k: node.plain() for k, node in root.items()}
        try:
            config = TrainConfig.model_validate(data)
        except ValidationError as error:
            self._explain(error, root)
            config = TrainConfig.model_validate(self._without_wrong(data))
        findings = [*find_conflicts(config, explicit), *find_not_yet(config)]
        for found in self._reliable(findings):
            where = place_of(found.key, root, self._where)
            self.problems.append(f"{where}: {found.key}: {found.message}")
        return config

    def _known_part(self, section: str, node: Located) -> Located:
        if node.value is None:  # a section whose keys are all commented out
            return replace(node, value={})
        fields = SECTIONS[section].model_fields
        if not isinstance(node.value, dict):
            got = show_value(node.plain())
            self.refuse(
                node.where, section, f"wanted keys below it ({', '.join(fields)}), got {got}"
            )
            self._wrong |= {f"{section}.{leaf}" for leaf in fields}
            return replace(node, value={})
        for leaf in [leaf for leaf in node.value if leaf not in fields]:
            self._refuse_unknown(node.value[leaf], section, leaf)
        return replace(node, value={k: v for k, v in node.value.items() if k in fields})

    def _refuse_unknown(self, node: Located, section: str | None, name: str) -> str | None:
        meant, message = suggest_key(section, name)
        self.refuse(node.where, f"{section}.{name}" if section else name, message)
        if meant is not None:
            self._wrong.add(meant)  # that it is absent is no second mistake
        return meant

    def _without_wrong(self, data: dict[str, object]) -> dict[str, dict[str, object]]:
        kept: dict[str, dict[str, object]] = {name: {} for name in SECTIONS}
        for key, stand_in in _STAND_INS.items():
            section, _, leaf = key.partition(".")
            kept[section][leaf] = stand_in
        for section, values in data.items():
            if isinstance(values, dict):
                kept[section] |= {
                    k: v for k, v in values.items() if f"{section}.{k}" not in self._wrong
                }
        return kept

    def _reliable(self, findings: Iterable[Finding]) -> list[Finding]:
        return [f for f in findings if not self._wrong.intersection({f.key, *f.reads})]

    def _explain(self, error: ValidationError, root: dict[str, Located]) -> None:
        """One message a value: of a union, pydantic reports every member by an inner name."""
        kinds: dict[Path, str] = {}
        for detail in error.errors(include_url=False, include_context=False, include_input=False):
            kinds[_written_path(detail["loc"], root)] = detail["type"]
        for path, kind in kinds.items():
            # Of a mapping in a union, say what is wrong inside, not that it is not a text.
            if any(other[: len(path)] == path and other != path for other in kinds):
                continue
            self._explain_one(path, kind, root)

    def _explain_one(self, path: Path, kind: str, root: dict[str, Located]) -> None:
        key = f"{path[0]}.{path[1]}"
        node = Located("", root).at(*path)
        if node is None:
            if key not in self._wrong:
                where = place_of(key, root, self._where)
                self.refuse(where, key, f"missing; wanted {wanted(KEYS[key])}")
            return
        shown = key
        for part in path[2:]:
            shown += f"[{part}]" if isinstance(part, int) else f".{part}"
        annotation = KEYS[key]
        if len(path) > 2 and isinstance(path[-1], str):
            leaves = NESTED[key]
            if kind == "extra_forbidden":
                near = nearest(path[-1], leaves)
                hint = f". Did you mean `{near}`?" if near else f". Known here: {', '.join(leaves)}"
                self.refuse(node.where, shown, f"unknown key{hint}")
                return
            annotation = leaves[path[-1]]
        value = node.plain()
        word = suggest_word(value, annotation)
        hint = f". Did you mean `{word}`?" if word else ""
        kinds = wanted(annotation)
        if isinstance(value, int) and value > MAX_INT and "whole number of at least" in kinds:
            kinds += f", and at most {MAX_INT}"  # else what is said of it would be untrue
        self.refuse(node.where, shown, f"wanted {kinds}, got {show_value(value)}{hint}")


def place_of(key: str, root: dict[str, Located], file: str) -> str:
    """Where a dotted key stands; where it is absent, its section, or else the file."""
    section, _, leaf = key.partition(".")
    parent = root.get(section)
    if parent is None:
        return file
    child = parent.value.get(leaf) if isinstance(parent.value, dict) else None
    if child is not None:
        return child.where
    # A section that an override of another key brought in is no place to look for this one.
    return file if parent.where.startswith("override ") else parent.where


def show_value(value: object) -> str:
    """A wrong value, short enough for one line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return f"a mapping of {', '.join(value) or 'nothing'}"
    if isinstance(value, str):
        return f"the text {value!r}" if len(value) <= 60 else f"the text {value[:57]!r}..."
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _written_path(loc: Path, root: dict[str, Located]) -> Path:
    """The part of pydantic's location that the user wrote: section, key, and what is below it.

    Names of union members are left out, and so are positions in what is not written as a list.
    """
    path = loc[:2]
    node = Located("", root).at(*path)
    if f"{path[0]}.{path[1]}" not in NESTED:
        return path
    for part in loc[2:]:
        below = node.at(part) if node is not None else None
        if below is not None:
            node, path = below, (*path, part)
    return path
