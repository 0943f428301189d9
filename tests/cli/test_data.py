"""`megatrain data preview`: rows, places and counts, before any weights are read."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megatrain_cli.cli.app import app
from megatrain_cli.config.load import load_config
from megatrain_cli.data.template import IGNORED, SkipReason
from megatrain_cli.train.assemble import prepare
from megatrain_cli.train.rows import load_rows
from tests.train.workspace import make_workspace


def preview(*words: str | Path, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["data", "preview", *map(str, words)])
    found = getattr(result.exception, "exit_code", None) or result.exit_code
    assert found == code, (result.output, result.exception)
    return result


def as_json(*words: str | Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows, and the counts behind them."""
    *rows, counts = map(json.loads, preview(*words, "--json").stdout.splitlines())
    return rows, counts


def chat(*turns: str) -> str:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    return json.dumps({"messages": messages}) + "\n"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of two files, one of them with rows that teach nothing; no weights."""
    monkeypatch.chdir(tmp_path)
    make_workspace(tmp_path, data={"train": "rows"})
    for path in (tmp_path / "model").glob("*.safetensors"):
        path.unlink()
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.jsonl").write_text(chat("p", "one") + chat("q", " ") + chat("r", "2"))
    (tmp_path / "rows" / "b.jsonl").write_text(chat("s", " ") + chat("t", "x", "u", "yes"))
    return Path("config.yaml")


def test_each_row_names_its_file_and_line_and_what_is_learnt(config: Path) -> None:
    rows, counts = as_json(config, "-n", "9", "data.shuffle=true")
    assert [(row["source"], row["line"]) for row in rows] == [
        ("rows/a.jsonl", 1),
        ("rows/a.jsonl", 3),
        ("rows/b.jsonl", 2),
    ]
    assert [row["trained_text"] for row in rows] == [
        ["one<|im_end|>"],
        ["2<|im_end|>"],
        ["x<|im_end|>", "yes<|im_end|>"],
    ]
    for row in rows:
        pairs = list(zip(row["labels"], row["input_ids"], strict=True))
        assert all(label in (IGNORED, token) for label, token in pairs)
        assert "documents" not in row
    assert (counts["num_read"], counts["num_used"], counts["num_rows"]) == (5, 3, 3)
    assert counts["skipped"][SkipReason.EMPTY] == {
        "count": 2,
        "places": ["rows/a.jsonl:2", "rows/b.jsonl:1"],
    }
    assert counts["sources"] == [{"source": "rows", "format": "messages", "used": 3}]
    lengths = [len(row["input_ids"]) for row in rows]
    assert counts["row_lengths"]["max"] == max(lengths)
    assert counts["row_lengths"]["mean"] == pytest.approx(sum(lengths) / 3)
    assert counts["num_tokens"] == sum(lengths)


def test_several_sources_are_counted_one_by_one(config: Path) -> None:
    sources = "data.train=[rows/b.jsonl, rows/a.jsonl]"
    rows, counts = as_json(config, sources)
    assert [row["source"] for row in rows] == ["rows/b.jsonl", "rows/a.jsonl", "rows/a.jsonl"]
    assert [source["used"] for source in counts["sources"]] == [1, 2]
    out = preview(config, sources, "-n", "0").stdout
    assert "rows/a.jsonl: 2 rows used" in out
    assert "in brackets" not in out


def test_places_are_the_same_from_the_cache(config: Path) -> None:
    fresh = as_json(config, "data.cache_dir=kept")
    assert as_json(config, "data.cache_dir=kept") == fresh
    assert [row["source"] for row in fresh[0]][-1] == "rows/b.jsonl"
    assert "were prepared before" in preview(config, "data.cache_dir=kept").stderr


def test_where_there_is_no_colour_what_is_learnt_stands_in_brackets(config: Path) -> None:
    out = preview(config, "-n", "1").stdout
    assert out.startswith("[trained] in brackets\n\nrow 1: rows/a.jsonl:1, ")
    assert "<|im_start|>assistant\n[one<|im_end|>]" in out
    assert "5 rows read, 3 used, 2 skipped" in out
    assert "tokens of a row: shortest " in out
    assert "x<|im_end|>" not in out


def test_packs_are_those_of_the_run_and_tell_their_documents(tmp_path: Path) -> None:
    path = make_workspace(tmp_path, rows=30, data={"packing": True, "shuffle": True})
    loaded = load_config(path)
    packs = load_rows(loaded.config, prepare(loaded)[1].decisions).packs
    assert packs is not None
    wanted = [packs.row(i) for i in range(len(packs))]
    rows, counts = as_json(path, "-n", "99")
    assert sorted([line - 1 for line in row["line"]] for row in rows) == sorted(wanted)
    firsts = [min(row["line"]) for row in rows]
    assert firsts == sorted(firsts)
    assert firsts[0] == 1
    for row in rows:
        at = 0
        for source, line, document in zip(
            row["source"], row["line"], row["documents"], strict=True
        ):
            assert (document["source"], document["line"]) == (source, line)
            assert document["start"] == at
            at += document["tokens"]
        assert at == len(row["input_ids"]) <= counts["packing"]["capacity"]
        assert len(row["trained_text"]) == len(row["documents"])
        targets = sum(document["targets"] for document in row["documents"])
        assert targets == sum(label != IGNORED for label in row["labels"][1:])
    assert counts["packing"]["documents"] == 30
    assert counts["num_rows"] == len(rows) == len(wanted)


def test_packs_are_drawn_with_their_borders(config: Path) -> None:
    out = preview(config, "data.packing=true", "-n", "1", "data.max_length=512").stdout
    assert "row 1: 2 documents, " in out
    assert "--- 1 of 2: rows/a.jsonl:1, tokens 0 to " in out
    assert "positions from 0 to " in out
    assert "--- end of row 1" in out
    assert "documents packed into" in out


def test_no_target_of_a_pack_is_the_first_token_of_a_later_document(config: Path) -> None:
    Path("text.jsonl").write_text('{"text": "abc"}\n{"text": "de"}\n')
    words = ("data.train=text.jsonl", "data.packing=true")
    [row], _ = as_json(config, *words)
    for document in row["documents"][1:]:
        assert row["labels"][document["start"]] == IGNORED
    assert row["trained_text"] == ["abc<|im_end|>", "e<|im_end|>"]
    assert [document["targets"] for document in row["documents"]] == [3, 2]
    whole, _ = as_json(config, words[0])
    assert [one["trained_text"] for one in whole] == [["abc<|im_end|>"], ["de<|im_end|>"]]


def test_rows_of_a_pack_end_where_the_model_does(config: Path) -> None:
    settings = Path("model/config.json")
    values = json.loads(settings.read_text())
    settings.write_text(json.dumps(values | {"max_position_embeddings": 100}))
    _, counts = as_json(config, "data.packing=true", "data.max_length=512")
    assert counts["packing"]["capacity"] == max(100, counts["longest"])


@pytest.mark.parametrize("packing", [False, True])
def test_what_is_held_out_is_not_counted_as_learnt(tmp_path: Path, packing: bool) -> None:
    config = make_workspace(tmp_path, data={"eval_share": 0.4, "packing": packing})
    rows, counts = as_json(config, "-n", "99")
    tokens = sum(len(row["input_ids"]) for row in rows)
    targets = sum(label != IGNORED for row in rows for label in row["labels"][1:])
    assert counts["num_held_out"] >= 5
    assert (counts["num_trained_tokens"], counts["num_trained_targets"]) == (tokens, targets)
    said = preview(config).stdout
    held, trained = counts["num_held_out"], 12 - counts["num_held_out"]
    assert f"{held} of them are held out for evaluation" in said
    assert f"trained on are {trained}: {tokens} tokens, {targets} of them targets" in said
    told = load_rows(load_config(config).config, prepare(load_config(config))[1].decisions).lines()
    assert f"trained on are {trained}: {tokens} tokens, {targets} of them targets" in told[-1]


@pytest.mark.parametrize(
    ("row", "is_chat"),
    [
        ({"text": "abc"}, False),
        ({"input_ids": [1, 2]}, False),
        ({"instruction": "a", "output": "b"}, True),
    ],
)
def test_a_template_that_writes_no_row_is_said(
    config: Path, row: dict[str, object], is_chat: bool
) -> None:
    Path("rows.jsonl").write_text(json.dumps(row) + "\n")
    given = (config, "data.train=rows.jsonl")
    said = "data.template: no row is a chat, so nothing is written with it; it is saved with the"
    assert (said in preview(*given, "data.template=alpaca").stderr) is not is_chat
    assert said not in preview(*given).stderr


def test_a_bad_row_is_refused_with_its_place_and_nothing_is_printed(config: Path) -> None:
    with Path("rows/b.jsonl").open("a") as file:
        file.write('{"messages": "secret"}\n')
    result = preview(config, "--json", code=1)
    assert "rows/b.jsonl:3: " in str(result.exception)
    assert "secret" not in str(result.exception)
    assert result.stdout == ""
    _, counts = as_json(config, "data.on_bad_row=skip", "data.max_bad_share=0.5")
    assert (counts["num_read"], counts["num_used"]) == (6, 3)


def test_wrong_usage_leaves_with_2(config: Path) -> None:
    assert "0" in preview(config, "-n", "-1", code=2).stderr
    assert "wanted key=value" in preview(config, "nonsense", code=2).stderr
    assert CliRunner().invoke(app, ["data"]).exit_code == 2
