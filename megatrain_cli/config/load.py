"""Read a run's YAML file and the overrides of the command line into a `TrainConfig`.

Every problem is reported at once, each as `file:line: dotted.key: problem. Did you mean ...?`;
what comes from the command line is located as "override `key=value`".
"""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from stat import S_ISDIR

import yaml

from megatrain_cli.config.check import Checker, show_value
from megatrain_cli.config.names import SECTIONS
from megatrain_cli.config.paths import (
    GivenPath,
    escape_paths,
    is_hub_id,
    resolve_paths,
    split_entry,
)
from megatrain_cli.config.rules import find_idle
from megatrain_cli.config.schema import TrainConfig
from megatrain_cli.config.tree import CoreDumper, Located, TreeError, read_tree
from megatrain_cli.errors import ConfigError
from megatrain_cli.regular import other_kind, read_file


@dataclass(frozen=True)
class LoadedConfig:
    """A config, and how it came to be.

    Attributes:
        config: Valid; its paths are absolute.
        path: The file it was read from, as given.
        explicit: Dotted keys that the file or an override set.
        notes: Keys that were set and have no effect, one line each, to be shown to the user.
        given: The paths as they were written.
        overrides: What the command line changed, as `key=value`.
    """

    config: TrainConfig
    path: Path
    explicit: frozenset[str]
    notes: tuple[str, ...] = ()
    given: tuple[GivenPath, ...] = ()
    overrides: tuple[str, ...] = ()


def load_config(path: Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Read a config file and lay overrides (`train.max_steps=5`) over it.

    Raises:
        ConfigError: Carries every problem found.
    """
    return parse_config(_read_text(path), path, overrides, path.absolute().parent)


def parse_config(text: str, path: Path, overrides: Sequence[str], folder: Path) -> LoadedConfig:
    """Read the text of a config file.

    Args:
        text: All of it.
        path: Names it in messages.
        overrides: Laid over it, as `train.max_steps=5`.
        folder: Where relative paths start, those of overrides too.

    Raises:
        ConfigError: Carries every problem found.
    """
    checker = Checker(str(path))
    try:
        tree, problems = read_tree(text, lambda line: f"{path}:{line}")
    except TreeError as error:
        raise ConfigError(str(error)) from error
    checker.problems += problems
    if not isinstance(tree.value, dict):
        got = "nothing" if tree.value is None else show_value(tree.plain())
        raise ConfigError(
            f"{tree.where}: wanted sections such as `model:`, `data:` and `train:`, got {got}"
        )
    root = _lay_over(tree.value, overrides, checker)
    known = checker.drop_unknown(root)
    resolved, given = resolve_paths(known, folder, checker.refuse)
    explicit = frozenset(
        f"{section}.{leaf}"
        for section, node in known.items()
        if isinstance(node.value, dict)
        for leaf in node.value
    )
    config = checker.validate(resolved, explicit)
    if checker.problems:
        raise ConfigError(_in_file_order(checker.problems, str(path)))
    # A default that was written out, as `dump_config` does, is no wish that goes unmet.
    notes = tuple(
        f"{f.key}: {f.message}"
        for f in find_idle(config)
        if f.key in explicit and not _is_default(config, f.key)
    )
    return LoadedConfig(config, path, explicit, notes, given, tuple(overrides))


def check_paths(loaded: LoadedConfig, *, resumed: bool = False) -> None:
    """Check that everything the config reads from is there.

    Args:
        loaded: The config.
        resumed: It is a checkpoint's, which nobody can edit.

    Raises:
        ConfigError: Names each missing path as it was written and as it was resolved.
    """
    problems: list[str] = []
    sources = [given for given in loaded.given if _is_rows(given)]
    for given in loaded.given:
        shown = f"`{given.text}`"
        if given.text != str(given.resolved):
            shown += f" (resolved to {given.resolved})"
        problem = _problem_of(given, shown, loaded.config.model.path, sources)
        if problem is None:
            continue
        if resumed and _is_rows(given) and not given.where.startswith("override "):
            key = given.key.partition("[")[0]
            problem += f". Say where the rows are now, as `{key}=...` on the command line"
        problems.append(f"{given.where}: {given.key}: {problem}")
    if problems:
        raise ConfigError(problems)


def _is_rows(given: GivenPath) -> bool:
    return given.key.startswith(("data.train", "data.eval"))


def _problem_of(
    given: GivenPath, shown: str, model: Path, sources: Sequence[GivenPath]
) -> str | None:
    """Why a path cannot be used for its key; None if it can, as far as looking at it tells.

    Args:
        given: The path.
        shown: How it is named.
        model: Of the model's folder.
        sources: Where rows are read from.
    """
    is_rows = _is_rows(given)
    looked_at, _ = split_entry(given.resolved) if is_rows else (given.resolved, None)
    try:
        mode = looked_at.stat().st_mode
        if (kind := other_kind(mode)) is not None:  # reading it might never end
            return f"{shown} is {kind}, where a file or a folder belongs"
        is_folder = S_ISDIR(mode)
        if given.key == "model.path" and is_folder:
            found = _find_other(looked_at)
            if found is not None:
                return f"{shown} holds {found}, which no model has; move it away"
    except (FileNotFoundError, NotADirectoryError):
        is_folder = None
    except OSError as error:  # a name too long, a folder that is closed to us, links in a circle
        return f"{shown} cannot be used: {error.strerror}"
    if given.key in ("train.output_dir", "data.cache_dir"):  # made where they are not there
        if is_folder is False:
            return f"{shown} is a file; name a folder"
        if given.resolved == model:
            return f"{shown} is the model's folder; name another"
        return _read_as_rows(given.resolved, shown, sources)
    wants_folder = given.key == "model.path"
    if is_rows and (is_folder or (is_folder is None and is_hub_id(Path(given.text)))):
        return None  # all files below the folder; a hub is asked when rows are read
    if is_folder is None:
        missing = f"there is no {'model folder' if wants_folder else 'file'} {shown}"
        return missing + _remedy_of(given.text, wants_folder)
    if is_folder is wants_folder:
        return None
    kind, remedy = ("file", "the model's folder") if wants_folder else ("folder", "its files")
    return f"{shown} is a {kind}; name {remedy}"


def _read_as_rows(path: Path, shown: str, sources: Sequence[GivenPath]) -> str | None:
    """What is written there would be rows of a folder's, the next time at the latest."""
    for source in sources:
        if not path.is_relative_to(source.resolved):
            continue
        below = path.relative_to(source.resolved).parts
        if not any(part.startswith(".") for part in below):  # which is not looked into
            return (
                f"{shown} lies in {source.resolved} of `{source.key.partition('[')[0]}`, where "
                "every file is read as rows; name a folder outside of it"
            )
    return None


def _remedy_of(text: str, wants_folder: bool) -> str:
    """What to do where a text is no path but something that other tools take for one."""
    if "://" in text:
        return ". Addresses are not read: download it, and name the copy"
    if any(char in text for char in "*?[") and not wants_folder:
        return ". Patterns are not expanded: name a folder, or a list of files"
    if "," in text and not wants_folder:
        return f". Several files are a list: [{', '.join(text.split(','))}]"
    if wants_folder and is_hub_id(Path(text)):
        return (
            ". If that is a model of a hub: none is downloaded here. Fetch it with "
            f"`hf download {text} --local-dir FOLDER`, and name that folder"
        )
    return ""


def _find_other(model: Path) -> str | None:
    """What lies among a model's files and is none, such as `config.json, a pipe`."""
    for path in sorted([*model.iterdir(), *model.glob("additional_chat_templates/*")]):
        with suppress(FileNotFoundError):  # a link that leads nowhere: whoever needs it says so
            kind = other_kind(path.stat().st_mode)
            if kind is not None:
                return f"{path.relative_to(model)}, {kind}"
    return None


def dump_config(config: TrainConfig) -> str:
    """YAML that loads back to an equal config from any folder, given that its paths exist."""
    return yaml.dump(
        escape_paths(config.model_dump(mode="json")),
        Dumper=CoreDumper,
        sort_keys=False,
        allow_unicode=True,
        width=10_000,
    )


def _is_default(config: TrainConfig, key: str) -> bool:
    section, _, leaf = key.partition(".")
    values = getattr(config, section)
    return bool(getattr(values, leaf) == type(values).model_fields[leaf].default)


def _read_text(path: Path) -> str:
    try:
        raw = read_file(path)
    except FileNotFoundError:
        resolved = "" if path.is_absolute() else f" (resolved to {path.absolute()})"
        raise ConfigError(f"{path}: there is no such config file{resolved}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: this is a folder; name the config file in it") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text; save the file as UTF-8") from error


def _lay_over(
    root: dict[str, Located], overrides: Sequence[str], checker: Checker
) -> dict[str, Located]:
    seen: set[str] = set()
    for override in overrides:
        where = f"override `{override}`"
        key, equals, text = override.partition("=")
        parts = key.split(".")
        if not equals or not all(parts):
            checker.problems.append(f"{where}: wanted `section.key=value`")
            continue
        if key in seen:
            checker.refuse(where, key, "given twice on the command line. Keep one")
            continue
        below = sorted(other for other in seen if other.startswith(f"{key}."))
        seen.add(key)
        if below:
            checker.refuse(where, key, f"would undo `{below[0]}`, given before it. Keep one")
            continue
        try:
            value, problems = read_tree(text, _always(where))
        except TreeError as error:
            checker.problems.append(str(error))
            continue
        checker.problems += problems
        if key in SECTIONS and (value.value is None or isinstance(value.value, dict)):
            # What the file has in it would be gone without a word.
            checker.refuse(where, key, f"a section; change its keys, as `{key}.KEY=VALUE`")
            continue
        root = _with(root, parts, value, where)
    return root


def _always(where: str) -> Callable[[int], str]:
    return lambda _: where


def _in_file_order(problems: Sequence[str], file: str) -> list[str]:
    """Lines of the file in their order, then overrides."""
    numbered = re.compile(re.escape(file) + r":(\d+): ")

    def order(problem: str) -> tuple[bool, int]:
        match = numbered.match(problem)
        return problem.startswith("override "), int(match[1]) if match else 0

    return sorted(problems, key=order)


def _with(
    node: dict[str, Located], parts: Sequence[str], value: Located, where: str
) -> dict[str, Located]:
    """A copy of the mapping in which the key at `parts` has the value."""
    if len(parts) == 1:
        return {**node, parts[0]: value}
    child = node.get(parts[0], Located(where, {}))
    below = child.value if isinstance(child.value, dict) else {}
    changed = _with(below, parts[1:], value, where)
    kept = child if isinstance(child.value, dict) else replace(child, where=where)
    return {**node, parts[0]: replace(kept, value=changed)}
