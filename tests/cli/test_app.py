"""The command: exit codes, what goes to stdout and stderr, and how fast it answers."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatrain_cli import __version__, errors
from megatrain_cli.cli import app as app_module

CONFIG = """\
model: {path: model}
data: {train: train.jsonl}
train: {output_dir: run, max_steps: 4}
"""


Leaves = Callable[..., tuple[int, str, str]]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "model").mkdir()
    (tmp_path / "train.jsonl").write_text("")
    return tmp_path


@pytest.fixture
def megatrain(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Leaves:
    """The command in this process, in the project's folder: exit code, stdout, stderr."""
    monkeypatch.chdir(project)

    def leaves(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["megatrain", *words])
        with pytest.raises(SystemExit) as left:
            app_module.main()
        out, err = capsys.readouterr()
        return int(left.value.code or 0), out, err

    return leaves


def test_help_names_every_command() -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "megatrain_cli", "--help"]
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0
    assert result.stderr == ""
    for name in ("plan", "train", "probe", "resume", "inspect-ckpt", "export"):
        assert name in result.stdout


def test_importing_the_app_and_refusing_a_config_load_no_torch(project: Path) -> None:
    code = (
        "import sys\n"
        "from megatrain_cli.cli.app import main\n"
        "before = set(sys.modules)\n"
        "sys.argv = ['megatrain', 'plan', 'config.yaml', 'train.sed=1']\n"
        "try:\n    main()\n"
        "except SystemExit as left:\n    print(left.code)\n"
        "heavy = {'torch', 'transformers', 'numpy', 'safetensors'}\n"
        "print(sorted(heavy & set(sys.modules)), 'pydantic' in before)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=project,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stdout == "1\n[] False\n"
    assert "Did you mean `seed`?" in result.stderr


def test_version_is_one_line_on_stdout(megatrain: Leaves) -> None:
    assert megatrain("--version") == (0, f"megatrain {__version__}\n", "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plna"], "Did you mean 'plan'?"),
        (["plan"], "wanted a config file, or --model NAME"),
        (["train"], "Missing argument"),
        (["plan", "config.yaml", "nonsense"], "wanted key=value, got `nonsense`"),
        (["plan", "config.yaml", "--jsn"], "there is no option `--jsn`, and no value follows it"),
        (["plan", "--train.seed", "3", "config.yaml"], "the config file comes first"),
        (["plan", "train.seed=3", "config.yaml"], "the config file comes first"),
        (["inspect-ckpt", "run", "--jsn"], "No such option"),
    ],
)
def test_wrong_usage_leaves_with_2_and_says_what_to_do(
    megatrain: Leaves, words: list[str], message: str
) -> None:
    code, out, err = megatrain(*words)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "words", [["plan", "/c.yaml"], ["probe"], ["resume", "/run"], ["data", "preview", "/c.yaml"]]
)
def test_a_working_folder_that_was_removed_is_said_before_anything_is_loaded(
    megatrain: Leaves, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    code, out, err = megatrain(*words)
    assert (code, out) == (1, "")
    assert err.startswith("The working folder was removed.")


@pytest.mark.parametrize("command", ["plan", "train"])
def test_a_wrong_config_leaves_with_1_and_every_problem_on_stderr(
    megatrain: Leaves, project: Path, command: str
) -> None:
    (project / "config.yaml").write_text(CONFIG + "pipline: {}\nstore: {memory: ram}\n")
    code, out, err = megatrain(command, "config.yaml", "--train.max-steps", "-1")
    assert (code, out) == (1, "")
    assert [line.split(": ")[0] for line in err.splitlines()] == [
        "config.yaml:4",
        "config.yaml:5",
        "override `train.max_steps=-1`",
    ]


@pytest.mark.parametrize("command", ["plan", "train"])
def test_missing_files_leave_with_1_before_anything_is_loaded(
    megatrain: Leaves, project: Path, command: str
) -> None:
    (project / "train.jsonl").unlink()
    code, _, err = megatrain(command, "config.yaml")
    assert code == 1
    assert f"there is no file `train.jsonl` (resolved to {project}/train.jsonl)" in err
    assert "Traceback" not in err


def raising(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(prog_name: str) -> None:
        raise error

    monkeypatch.setattr(app_module, "app", refuse)


@pytest.mark.parametrize(
    "kind",
    [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.MegatrainError)
    ],
)
def test_each_error_leaves_with_its_code(
    kind: type[errors.MegatrainError],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = "what is wrong. What to do"
    error = kind("rows.jsonl:1", said) if kind is errors.RowError else kind(said)
    raising(error, monkeypatch)
    with pytest.raises(SystemExit) as left:
        app_module.main()
    assert left.value.code == kind.exit_code
    out, err = capsys.readouterr()
    assert out == ""
    assert "what is wrong. What to do" in err
    assert ("Traceback" in err) == (kind is errors.InternalError)


def test_an_error_that_is_none_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    raising(ZeroDivisionError("ours to fix"), monkeypatch)
    with pytest.raises(ZeroDivisionError):
        app_module.main()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
@pytest.mark.parametrize("words", [["--help"], ["--version"], ["inspect-ckpt", "model", "--json"]])
def test_a_stdout_that_is_full_is_one_line_and_7(project: Path, words: list[str]) -> None:
    """The last one is written by a command, the others by Typer."""
    (project / "model/config.json").write_text("{}")
    save_file({"a": torch.zeros(1)}, project / "model/model.safetensors")
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "megatrain_cli", *words]
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(
            command,
            cwd=project,
            env=env,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (result.returncode, result.stderr) == (
        7,
        "stdout cannot be written: No space left on device. What was asked for is not whole.\n",
    )


@pytest.mark.parametrize("initialized", [True, False])
def test_after_a_device_has_failed_nothing_is_torn_down(initialized: bool) -> None:
    """A destructor that asks the device would abort the process, and 9 would be lost."""
    code = (
        "import atexit, sys\n"
        "from types import SimpleNamespace\n"
        "from megatrain_cli.cli import app\n"
        "from megatrain_cli.errors import DeviceError\n"
        f"cuda = SimpleNamespace(is_initialized=lambda: {initialized})\n"
        "sys.modules['torch'] = SimpleNamespace(cuda=cuda)\n"
        "atexit.register(print, 'torn down')\n"
        "def fail(**_):\n    raise DeviceError('It failed.')\n"
        "app.app = fail\n"
        "app.main()\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (9, "It failed.\n")
    assert done.stdout == ("" if initialized else "torn down\n")
