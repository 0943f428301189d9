"""Rows are known by their content: a file that only moved is the same; a changed one is named."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from megatrain_cli.checkpoint.facts import DataFacts, SourceFile
from megatrain_cli.data.content import hash_content, hash_files
from megatrain_cli.data.held_out import HELD_OUT
from megatrain_cli.data.hub import HubSet
from megatrain_cli.data.mixing import MIXING
from megatrain_cli.data.pack import RULE as PACKING
from megatrain_cli.data.source import SourceFile as DataSource
from megatrain_cli.data.table import Examples, hash_rows
from megatrain_cli.errors import DataError, IncompatibleError
from megatrain_cli.train.data_facts import check_data, data_facts, source_facts
from megatrain_cli.train.position import Position
from tests.train.workspace import make_workspace, start


def hash_file(path: Path) -> SourceFile:
    [found] = source_facts(DataSource(path), [hash_content(path)])
    return found


def facts(*paths: Path, rows: str = "1" * 32, order: str = "feistel-v1") -> DataFacts:
    return DataFacts(
        rows_xxh3_128=rows,
        num_rows=3,
        sources=tuple(map(hash_file, paths)),
        order=order,
        seed=1,
        shuffle=True,
        next_row=8,
        rows_per_step=4,
    )


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    a.write_text("first\n" * 10)
    b.write_text("second\n" * 10)
    return a, b


def edited(a: Path, b: Path) -> tuple[Path, ...]:
    a.write_text(a.read_text().replace("first", "First", 1))
    return a, b


def replaced(a: Path, b: Path) -> tuple[Path, ...]:
    a.unlink()
    a.write_text("third\n")
    return a, b


def shortened(a: Path, b: Path) -> tuple[Path, ...]:
    os.truncate(b, 7)
    return a, b


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            edited,
            r"a\.jsonl: not the content that the run was begun with: 60 bytes as then, but others",
        ),
        (replaced, r"a\.jsonl: not the content .*: 6 bytes now, 60 then \(a\.jsonl\)"),
        (shortened, r"b\.jsonl: not the content .*: 7 bytes now, 70 then"),
        (lambda a, b: (b, a), r"in another order; the checkpoint has a\.jsonl, b\.jsonl"),
        (lambda a, b: (a,), r"made with 2 data files \(a\.jsonl, b\.jsonl\), and there are 1 now"),
    ],
)
def test_files_with_other_content_or_order_are_refused_by_name(
    change: Callable[[Path, Path], tuple[Path, ...]], message: str, two: tuple[Path, Path]
) -> None:
    """F74."""
    saved = facts(*two)
    now = facts(*change(*two), rows="2" * 32)
    with pytest.raises(IncompatibleError, match=message):
        check_data(saved, now, (), 3)
    with pytest.raises(IncompatibleError, match=r"--allow-change data\.train"):
        check_data(saved, now, ("data.format",), 3)
    [line] = check_data(saved, now, ("data.train",), 3)
    assert line["step"] == 3
    assert line["old"] != line["new"] == [source.xxh3_128 for source in now.sources]


def test_a_file_that_was_touched_or_moved_is_the_same(
    two: tuple[Path, Path], tmp_path: Path
) -> None:
    """F74, F69: neither names nor times are asked."""
    saved = facts(*two)
    os.utime(two[0], (1, 1))
    assert check_data(saved, facts(*two), (), 3) == []
    moved = tmp_path / "elsewhere.txt"
    two[0].rename(moved)
    assert check_data(saved, facts(moved, two[1]), (), 3) == []


def test_the_same_files_with_other_tokens_are_refused_unless_a_key_explains_it(
    two: tuple[Path, Path],
) -> None:
    """F52."""
    saved, now = facts(*two), facts(*two, rows="2" * 32)
    with pytest.raises(IncompatibleError, match=r"give other tokens.*The tokenizer"):
        check_data(saved, now, ("train.seed",), 3)
    assert check_data(saved, now, ("data.max_length",), 3) == []


def test_another_rule_of_order_is_refused(two: tuple[Path, Path]) -> None:
    with pytest.raises(IncompatibleError, match="the rule 'splitmix64-v1' in the checkpoint"):
        check_data(facts(*two, order="splitmix64-v1"), facts(*two), ("data.train",), 3)


@pytest.mark.parametrize(("rule", "key"), [(HELD_OUT, "data.eval_share"), (MIXING, "data.train")])
def test_a_rule_that_comes_or_goes_with_an_allowed_key_is_no_other_order(
    two: tuple[Path, Path], rule: str, key: str
) -> None:
    plain, ruled = facts(*two), facts(*two, order=f"feistel-v1+{rule}")
    for saved, now in ((plain, ruled), (ruled, plain)):
        assert check_data(saved, now, (key,), 3) == []
        with pytest.raises(IncompatibleError, match="The order of rows"):
            check_data(saved, now, ("train.seed",), 3)
    with pytest.raises(IncompatibleError, match="The order of rows"):
        check_data(facts(*two, order=f"feistel-v1+{PACKING}"), plain, (key,), 3)


def test_names_from_a_checkpoint_cannot_control_a_terminal(two: tuple[Path, Path]) -> None:
    hostile = SourceFile(name="\x1b[2J", path="x", bytes=1, xxh3_128="0" * 32)
    saved = facts(*two).model_copy(update={"sources": (hostile, hostile)})
    with pytest.raises(IncompatibleError) as caught:
        check_data(saved, facts(*two), (), 3)
    assert "\x1b" not in str(caught.value)


@given(st.binary(max_size=300))
def test_a_file_is_hashed_whole(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("data") / "rows"
    path.write_bytes(content)
    found = hash_file(path)
    assert (found.bytes, found.name) == (len(content), "rows")
    assert found.xxh3_128 == xxhash.xxh3_128_hexdigest(content)
    with pytest.raises(DataError, match="cannot be read"):
        hash_file(path.parent)


def examples(tokens: list[int], targets: list[bool], offsets: list[int]) -> Examples:
    return Examples(
        np.array(tokens, np.int32), np.array(targets, np.bool_), np.array(offsets, np.int64)
    )


@given(arrays.arrays(np.int32, st.integers(1, 20)), st.data())
def test_any_changed_token_target_or_border_is_another_hash(
    tokens: np.ndarray[tuple[int, ...], np.dtype[np.int32]], data: st.DataObject
) -> None:
    count = len(tokens)
    before = examples(tokens.tolist(), [True] * count, [0, count])
    at = data.draw(st.integers(0, count - 1))
    other = before.tokens.copy()
    other[at] ^= 1 << data.draw(st.integers(0, 30))
    targets = before.is_target.copy()
    targets[at] = False
    border = np.array(sorted({0, at, count}), np.int64)
    found = [
        hash_rows(before),
        hash_rows(Examples(other, before.is_target, before.offsets)),
        hash_rows(Examples(before.tokens, targets, before.offsets)),
    ]
    if len(border) == 3:
        found.append(hash_rows(Examples(before.tokens, before.is_target, border)))
    assert len(set(found)) == len(found)
    assert hash_rows(examples(tokens.tolist(), [True] * count, [0, count])) == found[0]


def test_the_hash_of_rows_does_not_depend_on_the_machine() -> None:
    """Little-endian bytes behind a line that says of what: another rule would fit no checkpoint."""
    whole = b"".join(
        f"{name} 3\n".encode() + b"".join(value.to_bytes(width, "little") for value in values)
        for name, width, values in (
            ("int64", 8, (0, 1, 3)),
            ("int32", 4, (1, 2, 3)),
            ("bool", 1, (0, 1, 1)),
        )
    )
    found = hash_rows(examples([1, 2, 3], [False, True, True], [0, 1, 3]))
    assert found == xxhash.xxh3_128_hexdigest(whole)


def test_the_facts_of_a_run_are_those_of_its_rows(tmp_path: Path) -> None:
    with start(make_workspace(tmp_path, rows=10)) as run:
        found = data_facts(run.loaded.config, run.rows)
        assert found.num_rows == 10
        assert found.rows_per_step == 4
        assert found.next_row == Position().row == 0
        assert found.rows_xxh3_128 == hash_rows(run.rows.examples)
        assert [source.name for source in found.sources] == ["train.jsonl"]
        assert check_data(found, data_facts(run.loaded.config, run.rows), (), 0) == []


def test_a_folder_is_all_its_files_and_a_hub_its_name(two: tuple[Path, Path]) -> None:
    folder = two[0].parent
    of_folder = source_facts(DataSource(folder), hash_files(DataSource(folder)))
    assert [facts.path for facts in of_folder] == [str(path) for path in sorted(two)]
    assert [facts.bytes for facts in of_folder] == [path.stat().st_size for path in sorted(two)]
    names = [
        source_facts(DataSource(Path("owner/name"), hub=hub), ())
        for hub in (
            HubSet("owner/name"),
            HubSet("owner/name", "en"),
            HubSet("owner/name", "e", "n"),
        )
    ]
    assert len({facts.xxh3_128 for [facts] in names}) == 3
    assert names[0][0].name == "owner/name[train]"
