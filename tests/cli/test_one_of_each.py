"""One of anything is said as one: `1 row`, not `1 rows`."""

import re
import sys
from pathlib import Path

import pytest

from megatrain_cli.cli.app import main
from tests.train.workspace import make_workspace, one_thread

# `1 is`, `step 1 has` and such are no counts.
_NO_COUNTS = {"as", "has", "is", "pass", "s", "was", "works"}


def said(monkeypatch: pytest.MonkeyPatch, *args: str) -> None:
    monkeypatch.setattr(sys, "argv", ["megatrain", *args])
    with one_thread(), pytest.raises(SystemExit) as left:
        main()
    assert not left.value.code


def test_no_command_says_one_of_something_as_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ones = {"max_steps": 1, "micro_batch_size": 1}
    config = str(make_workspace(tmp_path, rows=1, model={"layers": 1}, train=ones))
    run = str(tmp_path / "run")
    for args in (
        ("plan", config),
        ("train", config, "--dry-run", "data.packing=true"),
        ("data", "preview", config, "-n", "1"),
        ("data", "preview", config, "data.packing=true"),
        ("train", config, "checkpoint.save_steps=1"),
        ("resume", run, "--steps", "2"),
        ("inspect-ckpt", run, "--full"),
        ("inspect-ckpt", run, "--numerics"),
        ("export", run, str(tmp_path / "out")),
    ):
        said(monkeypatch, *args)
    text = "".join(capsys.readouterr())
    found = [
        match[0]
        for match in re.finditer(r"[^\n]*(?<![\w.,:/-])1 ([a-z-]+s)\b[^\n]*", text)
        if match[1] not in _NO_COUNTS
    ]
    assert found == []
