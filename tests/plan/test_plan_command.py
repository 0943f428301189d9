"""`megatrain plan`: a table for people, JSON for machines, 1 where a run does not fit."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatrain_cli.cli.app import main
from megatrain_cli.plan.machine import MachineSpec
from megatrain_cli.train import assemble
from tests.families import tiny_config
from tests.plan.small import GPU
from tests.train.workspace import make_workspace

MACHINE = MachineSpec(64 << 30, "cgroup v2", 2, "cpu")
HUGE = {"hidden_size": 16384, "num_hidden_layers": 126, "intermediate_size": 53248}
HUGE |= {"num_attention_heads": 128, "num_key_value_heads": 8, "vocab_size": 128256}


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> "Runner":
    config = make_workspace(tmp_path)
    capsys.readouterr()  # Hugging Face tells about the model it saved
    return Runner(monkeypatch, capsys, config)


class Runner:
    """Runs `megatrain plan` in this process, on a machine that is made up."""

    def __init__(
        self, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], config: Path
    ) -> None:
        self._patch, self._capsys, self.config = patch, capsys, config

    def __call__(self, *args: str, machine: MachineSpec = MACHINE) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        self._patch.setattr(assemble, "probe_machine", lambda device: machine)
        self._patch.setattr(sys, "argv", ["megatrain", "plan", str(self.config), *args])
        with pytest.raises(SystemExit) as left:
            main()
        out, err = self._capsys.readouterr()
        code = left.value.code
        return (code if isinstance(code, int) else 0), out, err


def test_a_run_that_fits_is_shown_as_a_table_with_totals(run: Runner) -> None:
    code, out, err = run("optimizer.learning_rate=1e-5")
    assert (code, err) == (0, "")
    assert "optimizer.learning_rate = 1e-05" in out
    for text in ("LlamaForCausalLM", "staging buffers", "first moments", "program and libraries"):
        assert text in out
    assert "total" in out
    assert "\nFITS: " in out
    assert "does not fit" not in out


def test_the_schedule_has_a_line_an_op(run: Runner) -> None:
    code, out, _ = run("--schedule")
    assert code == 0
    lines = out.splitlines()
    assert sum(line.split()[1:2] == ["update"] for line in lines) == 5
    assert sum(line.split()[1:2] == ["backward"] for line in lines) == 4 * 4
    read = json.loads(run("--schedule", "--json")[1])
    assert read["schedule"] == [line for line in lines if line in set(read["schedule"])]


def test_json_is_all_of_stdout_and_adds_up(run: Runner) -> None:
    code, out, err = run("--json")
    assert (code, err) == (0, "")
    read = json.loads(out)
    assert read["fits"] is True
    assert read["verdict"] == "FITS"
    assert read["step_seconds"] is None
    assert read["remedies"] == []
    assert read["machine"] == vars(MACHINE)
    assert read["config"]["data"]["max_length"] == 64
    assert read["host_peak_bytes"] == sum(line["num_bytes"] for line in read["lines"])


def make_huge(config: Path) -> None:
    """405B parameters; its config.json alone, as random weights need no more."""
    options = HUGE | {"max_position_embeddings": 8192}
    tiny_config("llama", tied=False, **options).save_pretrained(config.parent / "model")
    (config.parent / "model" / "model.safetensors").unlink()


@pytest.mark.slow
def test_a_model_of_hundreds_of_billions_is_planned_without_being_allocated(run: Runner) -> None:
    make_huge(run.config)
    bf16 = ["model.init=random", "model.dtype=bfloat16", "optimizer.master=fp32_split"]
    code, out, _ = run(*bf16)
    assert code == 1
    assert "does not fit: This run needs 5" in out
    assert "may be taken (cgroup v2)" in out
    assert "\nDOES NOT FIT: 5" in out
    assert "\nremedy: `optimizer.master: bf16_stochastic` frees " in out
    machine = replace(GPU, host_bytes=8 << 40, device_bytes=8 << 30)
    code, out, err = run(*bf16, "--json", machine=machine)
    assert code == 1
    read = json.loads(out)
    assert read["fits"] is False
    assert read["verdict"] == "DOES NOT FIT"
    assert all(remedy["gpu_bytes_freed"] > 0 for remedy in read["remedies"])
    assert {"data.max_length": 32} in [remedy["changes"] for remedy in read["remedies"]]
    assert read["host_peak_bytes"] > 14 * 400e9
    (shortfall,) = read["shortfalls"]
    assert "on NVIDIA H200" in shortfall
    assert err == f"does not fit: {shortfall}\n"
