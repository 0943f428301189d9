"""`megatrain probe` end to end on tiny sizes, and `plan` with what it wrote."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatrain_cli.cli.app import main
from megatrain_cli.measure import amounts
from megatrain_cli.plan.machine_file import (
    Fingerprint,
    default_path,
    load_machine_file,
    save_machine_file,
)
from tests.measure.test_machine import TINY
from tests.plan.small import GPU, RATES, measured_file
from tests.train.workspace import make_workspace


class Runner:
    """Runs a command in this process."""

    def __init__(self, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._patch, self._capsys = patch, capsys

    def __call__(self, *words: object) -> tuple[object, str, str]:
        """Exit code, stdout, stderr."""
        self._capsys.readouterr()
        self._patch.setattr(sys, "argv", ["megatrain", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            main()
        return (left.value.code or 0, *self._capsys.readouterr())


@pytest.fixture
def megatrain(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Runner:
    monkeypatch.setattr(amounts, "FULL", TINY)
    monkeypatch.chdir(tmp_path)
    return Runner(monkeypatch, capsys)


def test_json_is_the_file_where_plan_looks_and_talk_goes_to_stderr(megatrain: Runner) -> None:
    code, out, err = megatrain("probe", "--json", "--device", "cpu")
    assert code == 0
    path = default_path()
    assert path is not None
    assert path.read_text() == out
    assert json.loads(out)["machine"]["rates"]["link"] is None
    assert err.splitlines()[0] == "copies from memory to memory"
    assert err.splitlines()[-1] == f"saved {path}"
    file = load_machine_file()
    assert file is not None
    assert file.machine.rates is not None


def test_a_table_names_each_part_and_out_is_where_it_goes(
    megatrain: Runner, tmp_path: Path
) -> None:
    code, out, _ = megatrain("probe", "--device", "cpu", "--out", tmp_path / "here.json")
    assert code == 0
    labels = ("measured", "CPU", "RAM", "link", "copy in RAM", "Adam", "compute", "disk")
    starts = [line for line in out.splitlines() if line.startswith(labels)]
    assert len(starts) >= len(labels)
    assert load_machine_file(tmp_path / "here.json") is not None
    assert load_machine_file() is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "gpu"], "wanted auto, cpu, cuda or cuda:N, got `gpu`"),
        (["--device", "cuda:x"], "got `cuda:x`"),
        (["--disk", "none"], "there is no folder `none`"),
        (["--out", "."], "`.` is a folder, wanted a file"),
    ],
)
def test_wrong_usage_is_refused_before_anything_is_measured(
    megatrain: Runner, words: list[str], said: str
) -> None:
    code, out, err = megatrain("probe", *words)
    assert (code, out) == (2, "")
    assert said in " ".join(err.split())


def test_what_is_no_machine_file_is_left_as_it_is(megatrain: Runner, tmp_path: Path) -> None:
    """A rename would put a file in the place of `/dev/null`, too."""
    (tmp_path / "config.yaml").write_text("model: {path: model}\n")
    os.mkfifo(tmp_path / "pipe")
    for name, said in (
        ("config.yaml", "holds something else than a machine and is left as it is"),
        ("pipe", "is no ordinary file"),
    ):
        before = (tmp_path / name).stat()
        code, out, err = megatrain("probe", "--device", "cpu", "--out", name)
        assert (code, out) == (2, "")
        assert f"--out: `{name}` {said}" in " ".join(err.split())
        after = (tmp_path / name).stat()
        assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize("before", ["", "whole", "damaged"])
def test_an_empty_file_and_one_of_a_machine_are_replaced(
    megatrain: Runner, tmp_path: Path, before: str
) -> None:
    path = tmp_path / "m.json"
    text = measured_file(GPU, Fingerprint("Other", 3, 5, GPU.device_name, "1")).to_json()
    path.write_text({"": "", "whole": text, "damaged": text[:-40]}[before])
    assert megatrain("probe", "--device", "cpu", "--out", path)[0] == 0
    file = load_machine_file(path)
    assert file is not None
    assert file.fingerprint.gpu == ""


def test_a_folder_where_plan_looks_is_told_before_anything_is_measured(megatrain: Runner) -> None:
    place = default_path()
    assert place is not None
    place.mkdir(parents=True)
    code, out, err = megatrain("probe", "--device", "cpu")
    assert (code, out) == (1, "")
    assert err == (
        f"{place} is a folder, wanted a file. Remove it, or name another place with `--out`.\n"
    )


def test_what_was_measured_is_shown_where_it_cannot_be_saved(
    megatrain: Runner, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "machine.json"
    code, out, err = megatrain("probe", "--json", "--device", "cpu", "--out", path)
    assert code == 7
    assert json.loads(out)["machine"]["rates"]["adam"]
    assert err.splitlines()[-1].startswith(f"{path} cannot be written: ")


@pytest.mark.slow
def test_a_plan_after_a_probe_speaks_of_seconds(megatrain: Runner, tmp_path: Path) -> None:
    config = make_workspace(tmp_path)
    asked = ("pipeline.device=cpu", "optimizer.threads=1")
    _, before, _ = megatrain("plan", config, *asked)
    assert "run `megatrain probe` to see seconds" in before
    megatrain("probe", "--device", "cpu")
    _, after, _ = megatrain("plan", config, *asked)
    assert "step takes" in after
    assert "at least" in after
    read = json.loads(megatrain("plan", config, "--json", *asked)[1])
    assert read["bounds"]["floor"] >= read["bounds"]["compute"] > 0
    assert read["step_seconds"] > read["bounds"]["floor"]


def test_a_plan_for_another_machine_uses_its_file(megatrain: Runner, tmp_path: Path) -> None:
    config = make_workspace(tmp_path)
    there = replace(GPU, host_bytes=3 << 30, device_bytes=5 << 30, rates=RATES)
    fingerprint = Fingerprint("Other", 3, 5, GPU.device_name, "1")
    save_machine_file(measured_file(there, fingerprint), tmp_path / "there.json")
    asked = ("model.dtype=bfloat16", "optimizer.master=fp32_split", "pipeline.device=auto")
    code, out, err = megatrain("plan", config, "--machine", tmp_path / "there.json", *asked)
    assert (code, err) == (0, "")
    assert GPU.device_name in out
    assert "binds" in out
    assert "copies from 4.00 MiB on reach 80% of its peak" in out
    words = ("plan", config, "--json", "--machine", tmp_path / "there.json", *asked)
    read = json.loads(megatrain(*words)[1])
    assert read["machine"]["host_bytes"] == 3 << 30
    assert read["bounds"]["link"] > 0


def test_a_machine_file_that_cannot_be_used_is_one_line(megatrain: Runner, tmp_path: Path) -> None:
    config = make_workspace(tmp_path)
    path = tmp_path / "there.json"
    code, out, err = megatrain("plan", config, "--machine", path)
    assert (code, out) == (1, "")
    assert err == f"{path}: cannot be read: No such file or directory\n"
    path.write_text("{}")
    code, _, err = megatrain("plan", config, "--machine", path)
    assert code == 3
    assert err.startswith(f"{path} is damaged")
    assert err.count("\n") == 1
