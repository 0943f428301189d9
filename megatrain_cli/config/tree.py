"""YAML text as a tree that knows where each value was written.

YAML 1.2 core rules: `1e-5` is a number, `yes` and `012-05` are texts, only `true` and `false` are
booleans. PyYAML resolves by YAML 1.1, so the resolvers are replaced here; its parser is kept.
Every key must be written once; anchors, aliases and `<<` merges work.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import yaml

Scalar = str | int | float | bool | None

_TAG = "tag:yaml.org,2002:"
# A config has a hundred values. Aliases of aliases can ask for billions.
_MAX_NODES = 20_000
_RESOLVERS = (
    ("null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    ("int", re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$"), list("-+0123456789")),
    (
        "float",
        re.compile(
            r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
            r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        list("-+.0123456789"),
    ),
    ("merge", re.compile(r"^<<$"), ["<"]),
)


@dataclass(frozen=True)
class Located:
    """A value, and where its key (or list dash) stands, such as `config.yaml:12`."""

    where: str
    value: "Scalar | list[Located] | dict[str, Located]"

    def plain(self) -> object:
        """The value as plain Python data."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        return self.value

    def at(self, *path: str | int) -> "Located | None":
        """What stands below at these keys and list positions; None if nothing does."""
        node: Located | None = self
        for part in path:
            value = node.value if node is not None else None
            node = None
            if isinstance(value, dict) and isinstance(part, str):
                node = value.get(part)
            elif isinstance(value, list) and isinstance(part, int) and part < len(value):
                node = value[part]
        return node


class CoreLoader(yaml.SafeLoader):
    """PyYAML's parser with the scalars of YAML 1.2."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own shape


class CoreDumper(yaml.SafeDumper):
    """Quotes every text that YAML 1.1 or 1.2 would read as something else."""


for _name, _pattern, _first in _RESOLVERS:
    CoreLoader.add_implicit_resolver(_TAG + _name, _pattern, _first)
    CoreDumper.add_implicit_resolver(_TAG + _name, _pattern, _first)


class TreeError(Exception):
    """The text cannot be read as one YAML document; `where` is already part of the message."""


def read_tree(text: str, place: Callable[[int], str]) -> tuple[Located, list[str]]:
    """Parse one YAML document.

    `place` turns a line number, counted from 1, into the `where` of a message.

    Returns:
        The tree, and problems that leave the rest readable (such as doubled keys).

    Raises:
        TreeError: Nothing can be read; the message is one line.
    """
    try:
        root = yaml.compose(text, Loader=CoreLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        around = text.split("\n")[max(line - 2, 0) : line]
        raise TreeError(f"{place(line)}: not valid YAML: {_explain(error, around)}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, int(error.position)) + 1
        char = f"U+{int(error.character):04X}"
        raise TreeError(f"{place(line)}: not valid YAML: the character {char}") from error
    except RecursionError:
        raise TreeError(f"{place(1)}: not valid YAML: nested too deeply") from None
    if root is None:
        return Located(place(1), None), []
    builder = _Builder(place)
    try:
        return builder.build(root, root.start_mark.line + 1), builder.problems
    except RecursionError:
        raise TreeError(f"{place(1)}: not valid YAML: nested too deeply") from None


def _explain(error: yaml.MarkedYAMLError, around: Sequence[str]) -> str:
    """What is wrong, in words of a person who does not know PyYAML's.

    Args:
        error: What it says.
        around: The line where it was noticed, and the one before.
    """
    problem = error.problem or "unreadable"
    for line in around:
        indent = line[: len(line) - len(line.lstrip())]
        odd = next((char for char in indent if char not in " \t\r"), None)
        if odd is not None:
            return f"U+{ord(odd):04X} in an indent, which looks like a space; indent with spaces"
    if "'\\t'" in problem:
        return "a tab; indent with spaces"
    if "scanning an alias" in (error.context or ""):
        return "`*` begins the name of an alias; quote a text that begins with it"
    if "expected a single document" in (error.context or ""):
        return "a second document begins with `---`; write one config a file"
    if problem == "mapping values are not allowed here":
        return "a second `:` or a wrong indent; quote a text that holds `: `"
    return problem.replace("\n", " ")


class _Builder:
    """Turns PyYAML's nodes into `Located` values and collects problems on the way."""

    def __init__(self, place: Callable[[int], str]) -> None:
        self.problems: list[str] = []
        self._place = place
        self._open: set[int] = set()
        self._num_nodes = 0

    def build(self, node: yaml.Node, line: int) -> Located:
        where = self._place(line)
        self._num_nodes += 1
        if self._num_nodes > _MAX_NODES:
            raise TreeError(f"{where}: more than {_MAX_NODES} values; this is not a config")
        if id(node) in self._open:
            raise TreeError(f"{where}: an alias that contains itself")
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                self._check_tag(node, "map", where)
                return Located(where, self._mapping(node))
            if isinstance(node, yaml.SequenceNode):
                self._check_tag(node, "seq", where)
                items = [self.build(item, item.start_mark.line + 1) for item in node.value]
                return Located(where, items)
            return Located(where, self._scalar(node, where))
        finally:
            self._open.discard(id(node))

    def _check_tag(self, node: yaml.Node, kind: str, where: str) -> None:
        """A tag of a mapping or a list, such as `!include`, asks for something that is not done."""
        if node.tag != _TAG + kind:
            self._refuse_tag(node, where)

    def _refuse_tag(self, node: yaml.Node, where: str) -> None:
        self.problems.append(f"{where}: `{node.tag}` cannot be read; remove the `!` tag")

    def _mapping(self, node: yaml.MappingNode) -> dict[str, Located]:
        children: dict[str, Located] = {}
        lines: dict[str, int] = {}
        merged: dict[str, Located] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                self.problems.append(f"{self._place(line)}: a key must be a plain word")
            elif key.tag == _TAG + "merge":
                merged |= self._merge(value, line)
            elif key.value in lines:
                first = lines[key.value]
                self.problems.append(
                    f"{self._place(line)}: {key.value}: written twice; it already stands in"
                    f" line {first}. Keep one"
                )
            else:
                lines[key.value] = line
                children[key.value] = self.build(value, line)
        return merged | children

    def _merge(self, node: yaml.Node, line: int) -> Mapping[str, Located]:
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        merged: dict[str, Located] = {}
        for source in sources:
            built = self.build(source, line).value
            if isinstance(built, dict):
                merged = built | merged  # the first of several sources wins
            else:
                self.problems.append(f"{self._place(line)}: `<<` must be given a mapping")
                break
        return merged

    def _scalar(self, node: yaml.Node, where: str) -> Scalar:
        text: str = node.value
        tag = node.tag.removeprefix(_TAG)
        if tag in {"str", "merge"}:
            return text
        for name, pattern, _ in _RESOLVERS:
            if name == tag and pattern.match(text):
                return _convert(tag, text)
        self._refuse_tag(node, where)
        return text


def _convert(tag: str, text: str) -> Scalar:
    if tag == "null":
        return None
    if tag == "bool":
        return text.lower() == "true"
    if tag == "int":
        # Base 10 by name: for `int`, base 0 refuses the leading zeros that YAML 1.2 allows.
        base = {"0o": 8, "0x": 16}.get(text[:2], 10)
        return int(text, base) if len(text) < 100 else float(text)
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
