"""Overrides may be typed in three ways that mean the same."""

import os
import sys
from typing import get_type_hints

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.models import OptionInfo

from megatrain_cli.cli.app import app, main
from megatrain_cli.cli.options import count_threads, parse_overrides
from megatrain_cli.probe import cgroup

keys = st.from_regex(r"[a-z]+(_[a-z]+)?\.[a-z]+(_[a-z]+)*", fullmatch=True)
values = st.text().filter(lambda value: not value.startswith("--"))


@given(st.lists(st.tuples(keys, values, st.integers(0, 3)), max_size=5))
def test_all_spellings_mean_the_same(typed: list[tuple[str, str, int]]) -> None:
    words: list[str] = []
    for key, value, spelling in typed:
        dashed = key.replace("_", "-")
        words += [
            [f"{key}={value}"],
            [f"--{key}={value}"],
            [f"--{dashed}", value],
            [f"--{dashed}={value}"],
        ][spelling]
    assert parse_overrides(words) == tuple(f"{key}={value}" for key, value, _ in typed)


def test_a_negative_number_is_a_value() -> None:
    assert parse_overrides(["--a.b", "-1e-5"]) == ("a.b=-1e-5",)


def test_nothing_is_no_override() -> None:
    assert parse_overrides(None) == ()


@pytest.mark.parametrize("words", [["train"], ["--train.seed"], ["--a.b", "--c.d", "1"]])
def test_what_is_no_override_is_wrong_usage(words: list[str]) -> None:
    with pytest.raises(typer.BadParameter):
        parse_overrides(words)


def test_an_option_whose_metavar_is_its_name_says_how_it_is_spelled() -> None:
    """Typer 0.27 takes such a metavar for the option's name: `--DEVICE`."""
    asked = []
    for command in app.registered_commands:
        assert command.callback is not None
        for name, hint in get_type_hints(command.callback, include_extras=True).items():
            for info in getattr(hint, "__metadata__", ()):
                if isinstance(info, OptionInfo) and info.metavar == name.upper():
                    # In an annotation, the first name is where a default would be.
                    assert [info.default, *(info.param_decls or ())][0] == f"--{name}"
                    asked.append(name)
    assert asked, "nothing was looked at"


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (("plan",), 1),
        (("train",), 1),
        (("resume",), 5),
        (("inspect-ckpt",), 5),
        (("export", "out"), 5),
        (("probe", "--out", "x", "--disk"), 2),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
@pytest.mark.parametrize("ending", ["", "=1"])
def test_a_path_that_no_system_can_have_is_refused_without_a_traceback(
    command: tuple[str, ...],
    code: int,
    ending: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name, *rest = command
    where = "x" * 300 + ending
    words = [name, where, *rest] if name == "export" else [name, *rest, where]
    monkeypatch.setattr(sys, "argv", ["megatrain", *words])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == code
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(("cores", "quota", "threads"), [(64, None, 8), (4, None, 4), (64, 2, 2)])
def test_files_are_read_by_as_many_threads_as_cores_are_usable_up_to_eight(
    cores: int, quota: int | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.setattr(cgroup, "cpu_quota", lambda root, proc: quota)
    assert count_threads() == threads
