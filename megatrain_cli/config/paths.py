"""Paths as they are written in a config, and the places they stand for.

One base for all of them: the folder of the config file, wherever the command is run. A leading `~`
is the home folder; `${NAME}` is an environment variable, and `$$` stands for `$` itself.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from megatrain_cli.config.tree import Located

PATH_KEYS = (
    "model.path",
    "data.train",
    "data.eval",
    "data.template",
    "data.cache_dir",
    "train.output_dir",
)

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_FILE_NAME = re.compile(r"\.(jsonl|ndjson|json|csv|txt|parquet|arrow|gz|zst)$", re.IGNORECASE)
_ENTRY = re.compile(r"(.*\.json)#([^#]+)")

_VARIABLE = re.compile(r"\$\$|\$\{([^}]*)\}")
# What a shell would expand, at the start of a folder's or a file's name.
_BARE_VARIABLE = re.compile(r"(?:^|/)\$([A-Za-z_][A-Za-z0-9_]*)")


@dataclass(frozen=True)
class GivenPath:
    """One path of a config: as the user wrote it, and as it was resolved.

    Attributes:
        key: Dotted key.
        where: Where it was written, such as `config.yaml:3`.
    """

    key: str
    where: str
    text: str
    resolved: Path


def is_hub_id(path: Path) -> bool:
    """Whether a path in a config is the id of a data set, `owner/name`, and no file's name."""
    return bool(_HUB_ID.fullmatch(str(path))) and not _FILE_NAME.search(str(path))


def split_entry(path: Path) -> tuple[Path, str | None]:
    """The file of a path such as `data/dataset_info.json#name`, and the name of the entry in it."""
    match = _ENTRY.fullmatch(str(path))
    return (Path(match[1]), match[2]) if match else (path, None)


class _UnusableError(Exception):
    """A path that stands for no place; the message says why."""


def resolve_path(text: str, folder: Path) -> Path:
    """Expand `~` and `${NAME}`, then take the result from `folder` if it is relative."""

    def value_of(match: re.Match[str]) -> str:
        name = match[1]
        if name is None:
            return "$"
        value = os.environ.get(name)
        if value is None:
            raise _UnusableError(
                f"the environment variable `{name}` is not set; set it or write the path out"
            )
        if not value:  # `${SCRATCH}/run` would be `/run`, and `${DATA}` the config's own folder
            raise _UnusableError(
                f"the environment variable `{name}` is empty; set it or write the path out"
            )
        return value

    bare = _BARE_VARIABLE.search(text)
    if bare is not None:
        name = bare[1]
        raise _UnusableError(f"`${name}` is not expanded; write `${{{name}}}`")
    expanded = _VARIABLE.sub(value_of, text)
    if "\0" in expanded:
        raise _UnusableError("a path cannot hold a NUL character")
    try:
        path = folder / Path(expanded).expanduser()
    except RuntimeError as error:  # pathlib: no such user
        raise _UnusableError(f"the home folder of {expanded.split('/')[0]} is not known") from error
    # Unlike `Path.resolve` it takes every path: whether one can be opened is not asked here.
    resolved = Path(os.path.realpath(path))
    if not os.path.lexists(resolved) and os.access(path, os.F_OK):
        return Path(os.path.normpath(path))  # open, and without a name: as /dev/stdin of a pipe
    return resolved


def escape_paths(tree: Mapping[str, dict[str, object]]) -> dict[str, dict[str, object]]:
    """A config as plain data, with its absolute paths written so that `resolve_paths` gives them.

    A name may hold `$` itself, and a path that was resolved is not to be expanded once more.
    """

    def one(value: object) -> object:
        if isinstance(value, list):
            return [one(item) for item in value]
        if isinstance(value, dict) and "path" in value:
            return {**value, "path": one(value["path"])}
        return value.replace("$", "$$") if isinstance(value, str) and "/" in value else value

    escaped = dict(tree)
    for key in PATH_KEYS:
        section, _, leaf = key.partition(".")
        escaped[section] = {**escaped[section], leaf: one(escaped[section][leaf])}
    return escaped


def resolve_paths(
    root: dict[str, Located], folder: Path, refuse: Callable[[str, str, str], None]
) -> tuple[dict[str, Located], tuple[GivenPath, ...]]:
    """Replace every path text in the tree by its absolute form.

    `refuse` is called with where, dotted key and problem for each path that stands for no place.

    Returns:
        The tree, and what was replaced, in the order of `PATH_KEYS`.
    """
    given: list[GivenPath] = []

    def one(node: Located, key: str) -> Located:
        if isinstance(node.value, list):
            items = [one(item, f"{key}[{i}]") for i, item in enumerate(node.value)]
            return replace(node, value=items)
        if isinstance(node.value, dict) and "path" in node.value:
            path = one(node.value["path"], f"{key}.path")
            return replace(node, value={**node.value, "path": path})
        if not isinstance(node.value, str) or not node.value:
            return node
        if key == "data.template" and "." not in node.value:
            return node  # the name of a template
        if key == "data.cache_dir" and node.value == "auto":
            return node
        try:
            resolved = resolve_path(node.value, folder)
        except _UnusableError as error:
            refuse(node.where, key, str(error))
            return node
        given.append(GivenPath(key, node.where, node.value, resolved))
        if key == "model.path" and not _looks_local(node.value) and not is_folder(resolved):
            return node  # may be the id of a model on a hub: shown and recorded as it is
        is_rows = key.startswith(("data.train", "data.eval"))
        if is_rows and is_hub_id(Path(node.value)) and not exists(resolved):
            return node
        return replace(node, value=str(resolved))

    resolved_root = dict(root)
    for key in PATH_KEYS:
        section, _, leaf = key.partition(".")
        parent = resolved_root.get(section)
        if parent is not None and isinstance(parent.value, dict) and leaf in parent.value:
            child = one(parent.value[leaf], key)
            resolved_root[section] = replace(parent, value={**parent.value, leaf: child})
    return resolved_root, tuple(given)


def is_folder(path: Path) -> bool:
    """Whether a folder is there, as far as this user can see."""
    try:
        return path.is_dir()
    except OSError:  # a name too long, or a folder that is closed to us
        return False


def exists(path: Path) -> bool:
    """Whether something is there; also where the system does not tell."""
    try:
        return path.exists()
    except OSError:
        return True  # reading it says why it cannot be


def _looks_local(text: str) -> bool:
    return text.startswith((".", "/", "~")) or "$" in text or text.count("/") != 1
