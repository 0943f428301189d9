"""What a config names is what is read: files, entries of a registry, data sets of a hub."""

import json
import re
import sys
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import datasets
import pytest

from megatrain_cli.config.schema import DataSection
from megatrain_cli.data.formats import Row
from megatrain_cli.data.hub import HubSet
from megatrain_cli.data.registry import _ALPACA, _ROLE, _TURN
from megatrain_cli.data.source import SourceFile, read_rows
from megatrain_cli.data.sources import find_sources
from megatrain_cli.errors import DataError
from tests.data.kinds_of_file import ROWS, write_kind

Write = Callable[..., Path]


def sources(train: object, **more: object) -> tuple[SourceFile, ...]:
    return find_sources(DataSection.model_validate({"train": train, **more}))


def rows(train: object) -> list[Row]:
    return [row for source in sources(train) for row in read_rows(source)]


def said(row: Row) -> list[tuple[object, object]]:
    return [(turn["role"], turn["content"]) for turn in row.messages]


def test_a_source_has_what_the_config_says_of_it(write: Write) -> None:
    first = write([{"q": "a", "a": "b"}] * 3, "first.jsonl")
    second = write([{"text": "c"}], "second.jsonl")
    found = sources(
        [
            {
                "path": str(first),
                "columns": {"instruction": "q", "output": "a"},
                "max_rows": 2,
                "weight": 3,
            },
            str(second),
        ]
    )
    assert [source.weight for source in found] == [3.0, 1.0]
    got = [row for source in found for row in read_rows(source)]
    assert [row.source for row in got] == [0, 0, 1]
    assert [row.format for row in got] == ["alpaca", "alpaca", "text"]
    assert sources(str(second), format="text")[0].format == "text"
    assert sources([{"path": str(second), "format": "auto"}], format="text")[0].format == "auto"


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.jsonl", "JSON"), ("a.json", "JSON"), ("a.csv", "CSV"), ("a.dat", "JSON")],
)
def test_sample_by_is_refused_where_rows_are_no_lines_of_text(
    write: Write, name: str, kind: str
) -> None:
    path = write(b"text\na\n" if kind == "CSV" else [{"text": "a"}], name)
    refused = rf"{re.escape(str(path))}: `sample_by` .* plain text.*\.txt.* this is {kind}"
    for sample_by in ("line", "paragraph", "document"):
        with pytest.raises(DataError, match=refused):
            rows([{"path": str(path), "sample_by": sample_by}])
    assert [row.text for row in rows(str(path))] == ["a"]


@pytest.mark.parametrize(
    ("value", "data_format", "given", "told"),
    [
        ({"text": "a", "am": [1]}, "auto", {"columns": {"attention_mask": "am"}}, "`am`.* text"),
        ({"text": "a", "s": "b"}, "text", {"columns": {"system": "s"}}, "`s` for system.* text"),
        (
            {"instruction": "a", "output": "b", "t": "c"},
            "alpaca",
            {"columns": {"text": "t"}},
            "`t` for text.* alpaca",
        ),
        (
            {"instruction": "a", "output": "b"},
            "auto",
            {"columns": {"messages.role": "who"}},
            "`who` for messages.role.* alpaca",
        ),
        ({"text": "a"}, "auto", {"tags": {"user": "human"}}, "`tags` .* text"),
        ({"instruction": "a", "output": "b"}, "auto", {"tags": {"user": "x"}}, "`tags` .* alpaca"),
    ],
)
def test_names_for_what_the_format_does_not_have_are_refused(
    write: Write, value: dict[str, object], data_format: str, given: dict[str, object], told: str
) -> None:
    path = write([value], "a.jsonl")
    with pytest.raises(DataError, match=told):
        rows([{"path": str(path), "format": data_format, **given}])
    assert rows([{"path": str(path), "format": data_format}])


# LLaMA-Factory's registry


@pytest.fixture
def registry(tmp_path: Path) -> Callable[..., str]:
    """Write entries, and name one."""

    def registry(name: str = "it", **entries: Any) -> str:
        (tmp_path / "dataset_info.json").write_text("\ufeff" + json.dumps(entries))
        return f"{tmp_path}/dataset_info.json#{name}"

    return registry


def test_an_alpaca_entry_reads_the_columns_it_names_and_no_others(
    registry: Callable[..., str], write: Write
) -> None:
    plain = {"instruction": "a", "input": "x", "output": "b", "system": "s"}
    write([plain], "alpaca.json")
    entry = {"file_name": "alpaca.json", "file_sha1": "0"}
    assert said(rows(registry(it=entry))[0]) == [("user", "a\nx"), ("assistant", "b")]
    columns: dict[str, Any] = {"prompt": "instruction", "response": "output", "history": None}
    assert said(rows(registry(it={**entry, "columns": columns}))[0])[0] == ("user", "a")
    columns = {**columns, "query": "input", "system": "system"}
    turns = said(rows(registry(it={**entry, "columns": columns}))[0])
    assert turns == [("system", "s"), ("user", "a\nx"), ("assistant", "b")]


def test_an_entry_with_a_prompt_alone_is_plain_text(
    registry: Callable[..., str], write: Write
) -> None:
    write([{"text": "a"}, {"text": "b"}, {"text": "c"}], "c4.jsonl")
    entry = {"file_name": "c4.jsonl", "columns": {"prompt": "text"}, "num_samples": 2}
    assert [row.text for row in rows(registry(it=entry))] == ["a", "b"]
    assert len(rows([{"path": registry(it=entry), "max_rows": 1}])) == 1


def test_sharegpt_and_openai_entries_go_by_their_tags(
    registry: Callable[..., str], write: Write
) -> None:
    openai = {
        "role_tag": "role",
        "content_tag": "content",
        "user_tag": "user",
        "assistant_tag": "assistant",
        "system_tag": "system",
    }
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    write([{"messages": turns}], "chat.json")
    entry = {"file_name": "chat.json", "columns": {"messages": "messages"}}
    for formatting in ("sharegpt", "openai"):
        found = rows(registry(it={**entry, "formatting": formatting, "tags": openai}))
        assert said(found[0]) == [("user", "a"), ("assistant", "b")]
    own = {"role_tag": "who", "content_tag": "what", "user_tag": "U", "observation_tag": "O"}
    write([{"conversations": [{"who": "U", "what": "a"}, {"who": "O", "what": "b"}]}], "own.json")
    found = rows(registry(it={"file_name": "own.json", "formatting": "sharegpt", "tags": own}))
    assert said(found[0]) == [("user", "a"), ("tool", "b")]
    write(ROWS["sharegpt"], "tools.jsonl")
    found = rows(registry(it={"file_name": "tools.jsonl", "formatting": "sharegpt"}))
    assert found[1].tools == (), "the entry names no such column"


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"file_name": "a.json", "ranking": True}, "ranking: preferences"),
        ({"file_name": "a.json", "columns": {"images": "i"}}, "columns.images: this version does"),
        ({"file_name": "a.json", "columns": {"chosen": "i"}}, "columns.chosen: this version does"),
        ({"file_name": "a.json", "columns": {"prompt": 5}}, "columns.prompt: wanted a text"),
        ({"file_name": "a.json", "columns": []}, "columns: wanted an object"),
        ({"script_url": "x"}, "script_url: this version does"),
        ({"ms_hub_url": "a/b"}, "ms_hub_url: only the Hugging Face hub"),
        ({"om_hub_url": "a/b"}, "om_hub_url: only the Hugging Face hub"),
        ({}, "file_name: the file is not named"),
        ({"file_name": 5}, "file_name: wanted a text"),
        ({"file_name": "a.json", "split": "test"}, "split: a file has no splits"),
        ({"file_name": "a.json", "subset": "x"}, "subset: a file has no splits"),
        ({"file_name": "a.json", "num_samples": "5"}, "num_samples: wanted a whole number"),
        ({"file_name": "a.json", "formatting": "dpo"}, "formatting: `dpo` is not known"),
        (
            {"file_name": "a.json", "formatting": "sharegpt", "tags": {"x_tag": "x"}},
            "tags.x_tag: this version does",
        ),
    ],
)
def test_what_an_entry_asks_for_in_vain_is_refused_by_name(
    registry: Callable[..., str], entry: Any, reason: str
) -> None:
    with pytest.raises(DataError) as caught:
        sources(registry(it=entry))
    assert f"dataset_info.json#it: {reason}" in str(caught.value)


def tagged(tags: dict[str, str]) -> dict[str, object]:
    return {"file_name": "a.json", "formatting": "sharegpt", "tags": tags}


def test_one_name_for_two_things_of_an_entry_is_refused(registry: Callable[..., str]) -> None:
    """Of two roles the last one would be taken, of two fields each: neither was meant."""
    for keys, entry in (
        (_ROLE, lambda a, b: tagged({a: "x", "role_tag": "x", b: "x"})),
        (_TURN, lambda a, b: tagged({a: "x", "user_tag": "x", b: "x"})),
        (_ALPACA, lambda a, b: {"file_name": "a.json", "columns": {a: "x", b: "x"}}),
    ):
        kind = "columns" if keys is _ALPACA else "tags"
        for first, second in permutations(keys, 2):
            with pytest.raises(DataError) as caught:
                sources(registry(it=entry(first, second)))
            assert f"#it: {kind}.{second}: `x` is {kind}.{first} too. " in str(caught.value)


def test_one_tag_for_two_roles_is_refused_with_both(registry: Callable[..., str]) -> None:
    tags = {"user_tag": "human", "assistant_tag": "gpt", "observation_tag": "human"}
    with pytest.raises(DataError) as caught:
        sources(registry(it=tagged(tags)))
    assert str(caught.value).endswith(
        "#it: tags.observation_tag: `human` is tags.user_tag too. Give each a name of its own, or "
        "leave one out."
    )


def test_an_entry_that_is_not_there_is_refused(registry: Callable[..., str]) -> None:
    with pytest.raises(DataError, match=r"no entry `alpca`\. Did you mean `alpaca`\?"):
        sources(registry("alpca", alpaca={"file_name": "a.json"}))
    path = Path(registry().partition("#")[0])
    path.write_text("[]")
    with pytest.raises(DataError, match="wanted an object of named entries"):
        sources(f"{path}#it")
    path.write_text("{")
    with pytest.raises(DataError, match=r"dataset_info.json: broken JSON"):
        sources(f"{path}#it")
    with pytest.raises(DataError, match="there is no such file"):
        sources(f"{path.parent}/none.json#it")


def test_an_entry_may_be_on_a_hub(registry: Callable[..., str]) -> None:
    entry = {
        "hf_hub_url": "owner/name",
        "ms_hub_url": "other/name",
        "split": "test",
        "subset": "en",
        "revision": "main",
    }
    [source] = sources(registry(it=entry))
    assert source.hub == HubSet("owner/name", "en", "test", "main")
    assert (source.name, source.files) == ("owner/name", [])


# Hubs


@pytest.mark.parametrize("streaming", [False, True])
def test_a_folder_that_datasets_reads_gives_the_rows_of_its_files(
    tmp_path: Path, streaming: bool
) -> None:
    write_kind(tmp_path, "Parquet", ROWS["sharegpt"])
    source = SourceFile(tmp_path, hub=HubSet(str(tmp_path), streaming=streaming))
    found = list(read_rows(source))
    assert [row.messages for row in found] == [row.messages for row in rows(str(tmp_path))]
    assert [row.where for row in found] == [f"{tmp_path}[train]:{i}" for i in (1, 2, 3)]


def test_an_id_is_loaded_with_what_the_config_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load(*args: Any, **more: Any) -> list[Any]:
        asked.append((args, more))
        return ROWS["text"]

    monkeypatch.setattr(datasets, "load_dataset", load)
    given = {"path": "owner/name", "subset": "en", "split": "train[:3]", "revision": "v1"}
    found = rows([{**given, "streaming": True, "max_rows": 2}])
    assert [row.text for row in found] == [row["text"] for row in ROWS["text"][:2]]
    more = {"name": "en", "split": "train[:3]", "revision": "v1", "streaming": True}
    assert asked == [(("owner/name",), more)]
    [source] = sources("owner/name")
    assert source.hub == HubSet("owner/name")


def test_what_a_hub_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_args: Any, **_more: Any) -> None:
        raise datasets.exceptions.DatasetNotFoundError("it does not exist\nor is private")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(DataError) as caught:
        rows("owner/name")
    assert str(caught.value) == (
        "owner/name[train]: there is no such file or folder here, and the data set cannot be "
        "loaded: it does not exist"
    )
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"needs the library datasets.*'megatrain\[hub\]'"):
        rows("owner/name")
