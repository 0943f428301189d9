"""LLaMA-Factory's `dataset_info.json`, read unchanged: an entry is a source.

What an entry says of columns is all that is read: a column that it does not name is left alone, as
it is there. What it asks for and this program does not do (preferences, images, other hubs) is
refused by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatrain_cli.config.names import nearest
from megatrain_cli.data.files import MAX_ROW, open_bytes, show_path
from megatrain_cli.data.formats import Reading
from megatrain_cli.data.hub import HubSet
from megatrain_cli.data.json_file import BYTE_ORDER_MARK
from megatrain_cli.data.records import decode
from megatrain_cli.data.strict_json import parse_json
from megatrain_cli.data.unread import COLUMNS
from megatrain_cli.errors import DataError

_KEYS = {
    "file_name", "hf_hub_url", "ms_hub_url", "om_hub_url", "formatting", "ranking", "subset",
    "split", "num_samples", "revision", "columns", "tags",
    "file_sha1", "description",  # notes: LLaMA-Factory does not read them either
}  # fmt: skip
# Theirs -> ours.
_ALPACA = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "history": "history",
    "system": "system",
    "tools": "tools",
}
_CHAT = {"messages": "messages", "system": "system", "tools": "tools"}
_TURN = {"role_tag": "messages.role", "content_tag": "messages.content"}
_ROLE = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}
# What an entry has where it says nothing of columns.
_DEFAULTS = {
    "alpaca": {"prompt": "instruction", "query": "input", "response": "output"},
    "sharegpt": {"messages": "conversations"},
    "openai": {"messages": "conversations"},
}


@dataclass(frozen=True)
class Entry:
    """A source as the registry describes it."""

    path: Path
    format: str
    reading: Reading
    max_rows: int | None
    hub: HubSet | None


def read_entry(path: Path, name: str) -> Entry:
    """One entry of a registry.

    Args:
        path: The file; names of data files in it start at its folder.
        name: Of the entry.

    Raises:
        DataError: The file cannot be read, or has no such entry, or the entry asks for what this
            program does not do.
    """
    return _Reader(path, name).entry()


class _Reader:
    def __init__(self, path: Path, name: str) -> None:
        self._folder = path.parent
        self._where = f"{show_path(path)}#{name}"
        with open_bytes(path) as file:
            raw = file.read(MAX_ROW).removeprefix(BYTE_ORDER_MARK)
        place = show_path(path)
        entries = parse_json(decode(raw, place).strip(), place)
        if not isinstance(entries, dict):
            raise DataError(f"{place}: wanted an object of named entries")
        found = entries.get(name)
        if not isinstance(found, dict):
            near = nearest(name, entries)
            hint = f" Did you mean `{near}`?" if near else ""
            raise DataError(f"{place}: there is no entry `{name}`.{hint}")
        self._entry: dict[str, object] = found

    def entry(self) -> Entry:
        self._refuse_unknown("", self._entry, _KEYS)
        if self._entry.get("ranking"):
            raise self._refuse("ranking", "preferences (chosen and rejected) are not trained on")
        formatting = self._text("formatting") or "alpaca"
        if formatting not in _DEFAULTS:
            raise self._refuse(
                "formatting", f"`{formatting}` is not known; wanted {', '.join(_DEFAULTS)}"
            )
        columns = self._names("columns")
        found_format, reading = self._reading(formatting, columns)
        return Entry(
            self._folder / (self._text("file_name") or ""),
            found_format,
            reading,
            self._count("num_samples"),
            self._hub(),
        )

    def _reading(self, formatting: str, given: dict[str, str] | None) -> tuple[str, Reading]:
        fields = _ALPACA if formatting == "alpaca" else _CHAT
        named = _DEFAULTS[formatting] if given is None else given
        self._refuse_unknown("columns.", named, fields)
        if formatting == "alpaca" and set(named) == {"prompt"}:
            # Texts to go on with (its stage `pt`): a prompt and no answer.
            return "text", Reading({"text": named["prompt"]})
        self._refuse_doubled("columns", named, fields)
        columns = {ours: named.get(theirs) for theirs, ours in fields.items()}
        columns |= dict.fromkeys((*COLUMNS, "label"))  # those that are named were refused
        if formatting == "alpaca":
            return "alpaca", Reading(columns)
        tags = self._names("tags") or {}
        self._refuse_unknown("tags.", tags, {*_TURN, *_ROLE})
        self._refuse_doubled("tags", tags, _TURN)
        self._refuse_doubled("tags", tags, _ROLE)
        columns |= {ours: tags[theirs] for theirs, ours in _TURN.items() if theirs in tags}
        roles = {ours: tags[theirs] for theirs, ours in _ROLE.items() if theirs in tags}
        return "sharegpt" if formatting == "sharegpt" else "messages", Reading(columns, roles)

    def _hub(self) -> HubSet | None:
        """Where the rows are, if not in a file; a hub goes before a file, as it does there."""
        split, subset = self._text("split") or "train", self._text("subset")
        found = self._text("hf_hub_url")
        if found:
            return HubSet(found, subset, split, self._text("revision"))
        for key in ("ms_hub_url", "om_hub_url"):
            if self._text(key):
                raise self._refuse(key, "only the Hugging Face hub is read; name a file")
        if not self._text("file_name"):
            raise self._refuse("file_name", "the file is not named")
        for key, is_set in (("split", split != "train"), ("subset", subset is not None)):
            if is_set:
                raise self._refuse(key, "a file has no splits or subsets; name another file")
        return None

    def _text(self, key: str) -> str | None:
        found = self._entry.get(key)
        if found is not None and not isinstance(found, str):
            raise self._refuse(key, "wanted a text")
        return found

    def _count(self, key: str) -> int | None:
        found = self._entry.get(key)
        if found is not None and (
            not isinstance(found, int) or isinstance(found, bool) or found < 1
        ):
            raise self._refuse(key, "wanted a whole number of at least 1")
        return found

    def _names(self, key: str) -> dict[str, str] | None:
        """A mapping of names; those that are null are left out, as there."""
        found = self._entry.get(key)
        if found is None:
            return None
        if not isinstance(found, dict):
            raise self._refuse(key, "wanted an object of names")
        named = {}
        for name, value in found.items():
            if value is None:
                continue
            if not isinstance(value, str):
                raise self._refuse(f"{key}.{name}", "wanted a text")
            named[name] = value
        return named

    def _refuse_unknown(
        self, inside: str, found: Mapping[str, object], known: Mapping[str, str] | set[str]
    ) -> None:
        for key in found:
            if key not in known:
                raise self._refuse(
                    f"{inside}{key}",
                    f"this version does not read it; known are {', '.join(sorted(known))}",
                )

    def _refuse_doubled(
        self, inside: str, found: Mapping[str, str], keys: Mapping[str, str]
    ) -> None:
        """Refuse one name for two of some keys; `inside` is where they stand."""
        named: dict[str, str] = {}
        for key in [key for key in found if key in keys]:
            first = named.setdefault(found[key], key)
            if first != key:
                raise self._refuse(
                    f"{inside}.{key}",
                    f"`{found[key]}` is {inside}.{first} too. Give each a name of its own, or "
                    "leave one out",
                )

    def _refuse(self, key: str, reason: str) -> DataError:
        return DataError(f"{self._where}: {key}: {reason}.")
