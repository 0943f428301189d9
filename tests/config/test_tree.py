"""YAML 1.2: what is a number, a boolean or a text; each value knows its line; keys occur once."""

import math

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.config.tree import CoreDumper, Located, TreeError, read_tree


def read(text: str) -> Located:
    tree, problems = read_tree(text, str)
    assert problems == []
    return tree


def problems_of(text: str) -> list[str]:
    return read_tree(text, str)[1]


def error_of(text: str) -> str:
    with pytest.raises(TreeError) as caught:
        read_tree(text, str)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1E-8", 1e-8),
        ("+1e-5", 1e-5),
        ("1.0e5", 1e5),
        ("2e5", 2e5),
        (".5", 0.5),
        ("5.", 5.0),
        ("010", 10),
        ("0x10", 16),
        ("0o17", 15),
        ("-3", -3),
        ("+3", 3),
        (".inf", math.inf),
        ("-.INF", -math.inf),
        ("true", True),
        ("False", False),
        ("~", None),
        ("null", None),
        ("yes", "yes"),
        ("off", "off"),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("0b1", "0b1"),
        ("2024-01-01", "2024-01-01"),
        ("'1e-5'", "1e-5"),
        ("cuda:0", "cuda:0"),
        ("!!str 5", "5"),
        ("!!float 5", 5.0),
        ("!!int '5'", 5),
    ],
)
def test_scalars_are_read_by_yaml_1_2(text: str, value: object) -> None:
    read_value = read(f"key: {text}").plain()
    assert read_value == {"key": value}
    assert isinstance(read_value, dict)
    assert type(read_value["key"]) is type(value)


def test_nan_is_a_number() -> None:
    value = read("key: .nan").plain()
    assert isinstance(value, dict)
    assert math.isnan(value["key"])


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False)
# What cannot stand in a UTF-8 file cannot stand in a config.
texts = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")))
values = st.recursive(
    scalars | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(texts, values, max_size=4))
def test_what_is_dumped_is_read_back(value: dict[str, object]) -> None:
    text = yaml.dump(value, Dumper=CoreDumper, sort_keys=False, allow_unicode=True)
    assert read(text).plain() == value


def test_each_value_knows_the_line_of_its_key() -> None:
    tree = read("a:\n  b: 1\n\n  # talk\n  c:\n    - 2\n    - {d: 3,\n       e: 4}\n")
    lines = {("a",): 1, ("a", "b"): 2, ("a", "c"): 5, ("a", "c", 0): 6, ("a", "c", 1): 7}
    lines |= {("a", "c", 1, "d"): 7, ("a", "c", 1, "e"): 8}
    for path, line in lines.items():
        node = tree.at(*path)
        assert node is not None
        assert node.where == str(line)
    assert tree.at("a", "c", 2) is None
    assert tree.at("a", "b", "c") is None


def test_anchors_aliases_and_merges_work() -> None:
    text = "a: &x {p: 1, q: 2}\nb: *x\nc:\n  <<: *x\n  q: 3\n"
    value = {"a": {"p": 1, "q": 2}, "b": {"p": 1, "q": 2}, "c": {"p": 1, "q": 3}}
    assert read(text).plain() == value


def test_of_several_merged_mappings_the_first_wins() -> None:
    text = "a: &x {p: 1}\nb: &y {p: 2, q: 3}\nc: {<<: [*x, *y]}\n"
    assert read(text).plain() == {"a": {"p": 1}, "b": {"p": 2, "q": 3}, "c": {"p": 1, "q": 3}}


def test_a_doubled_key_is_refused_with_both_lines() -> None:
    text = "a:\n  b: 1\n  c: 2\n  b: 3\na: 4\n"
    assert problems_of(text) == [
        "4: b: written twice; it already stands in line 2. Keep one",
        "5: a: written twice; it already stands in line 1. Keep one",
    ]


def test_what_yaml_allows_and_a_config_does_not_is_refused() -> None:
    assert problems_of("? [a, b]\n: 1\n") == ["1: a key must be a plain word"]
    assert "remove the `!` tag" in problems_of("a: !!python/name:os.system ''\n")[0]
    assert problems_of("a: {<<: [3, 4]}") == ["1: `<<` must be given a mapping"]


@pytest.mark.parametrize(
    "value",
    ["!!python/object:os.system {b: 1}", "!include [b]", "!!set {b}", "!!omap [b: 1]", "!env b"],
)
def test_a_tag_that_asks_for_something_is_refused_on_every_kind_of_value(value: str) -> None:
    [problem] = problems_of(f"a: 1\nc: {value}\n")
    assert problem.startswith("2: `")
    assert problem.endswith("cannot be read; remove the `!` tag")
    assert problems_of("a: !!map {b: !!seq [!!str c]}") == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\n\tb: 2\n", "2: not valid YAML: a tab; indent with spaces"),
        ("a: 1\nb: c: d\n", "2: not valid YAML: a second `:` or a wrong indent"),
        ("a: [1, 2\nb: 3\n", "2: not valid YAML: "),
        ("a: 1\n---\nb: 2\n", "2: not valid YAML: a second document"),
        ("a: 1\nb: *.jsonl\n", "2: not valid YAML: `*` begins the name of an alias; quote"),
        ("a:\n\u00a0\u00a0b: 1\n  c: 2\n", "U+00A0 in an indent, which looks like a space"),
        ("a:\n\u3000b: 1\n  c: 2\n", "U+3000 in an indent"),
        ("a: *nowhere\n", "1: not valid YAML: found undefined alias"),
        ("a: 1\nb: \x00\n", "2: not valid YAML: the character U+0000"),
        ("a: &x [*x]\n", "1: an alias that contains itself"),
        ("[" * 5000, "not valid YAML: nested too deeply"),
    ],
)
def test_a_text_that_is_no_yaml_gives_one_line(text: str, message: str) -> None:
    error = error_of(text)
    assert message in error
    assert "\n" not in error


def test_aliases_of_aliases_cannot_fill_the_memory() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    assert "this is not a config" in error_of("\n".join(lines))
