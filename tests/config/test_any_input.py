"""Whatever is written, loading gives a config, or one-line problems that say where."""

from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatrain_cli.config.load import load_config
from megatrain_cli.config.names import KEYS, NESTED, SECTIONS
from megatrain_cli.errors import ConfigError

words = st.sampled_from([*SECTIONS, *(key.partition(".")[2] for key in KEYS), "lr", "path", "x"])
inner = st.sampled_from([leaf for leaves in NESTED.values() for leaf in leaves])
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 10)
    | st.floats()
    | st.sampled_from(["auto", "cpu", "fp32", "bf16", "text", "${X", "~", "a/b", "1e5", ""])
)
values = st.recursive(
    scalars,
    lambda v: st.lists(v, max_size=3) | st.dictionaries(inner | words, v, max_size=3),
    max_leaves=6,
)
files = st.dictionaries(words, st.dictionaries(words, values, max_size=4) | values, max_size=5)


def problems_of(path: Path, overrides: tuple[str, ...]) -> tuple[str, ...]:
    try:
        load_config(path, overrides)
    except ConfigError as error:
        return error.problems
    return ()


def check(path: Path, overrides: tuple[str, ...] = ()) -> None:
    for problem in problems_of(path, overrides):
        assert problem.startswith((str(path), "override `"))
        assert "\n" not in problem
        for inner_name in ("tuple[", "literal[", "function-", "KeepLayers", "DataSource"):
            assert inner_name not in problem


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files)
def test_any_mapping(tmp_path: Path, values: dict[str, object]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    check(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.binary(max_size=60) | st.text("abc:- {}[]&*!<\n\t'\"#|>%@`?,.", max_size=40).map(str.encode)
)
def test_any_bytes(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(raw)
    check(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(list(KEYS)), st.text("ab1.e:- {}[]&*!<'\"#|>%@`?,=", max_size=15))
def test_any_override(tmp_path: Path, key: str, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("model: {path: m}\ndata: {train: t}\ntrain: {output_dir: r, max_steps: 1}\n")
    check(path, (f"{key}={text}",))


@pytest.mark.parametrize("key", KEYS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(value=values)
def test_any_value_of_any_key_is_accepted_or_refused_at_that_key(
    tmp_path: Path, key: str, value: object
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("model: {path: m}\ndata: {train: t}\ntrain: {output_dir: r, max_steps: 1}\n")
    override = f"{key}={yaml.safe_dump(value, default_flow_style=True, width=10**6)}"
    check(path, (override.replace("\n...\n", "").strip(),))
