"""`plan --model NAME --machine NAME`: no folder, no hub, no GPU is needed to ask."""

import json
import sys
from pathlib import Path

import pytest
from transformers import MixtralConfig

from megatrain_cli.cli.app import main
from megatrain_cli.config.load import load_config
from megatrain_cli.errors import ModelError
from megatrain_cli.plan.machine_file import Fingerprint, save_machine_file
from megatrain_cli.plan.profiles import known_profiles
from megatrain_cli.train.assemble import prepare
from tests.model.test_experts import config_of, kept_dtypes
from tests.plan.small import GPU, measured_file


class Plan:
    """Runs `megatrain plan` in this process."""

    def __init__(self, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._patch, self._capsys = patch, capsys

    def __call__(self, *args: str) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        self._patch.setattr(sys, "argv", ["megatrain", "plan", *args])
        with pytest.raises(SystemExit) as left:
            main()
        out, err = self._capsys.readouterr()
        code = left.value.code
        return (code if isinstance(code, int) else 0), out, err


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Plan:
    return Plan(monkeypatch, capsys)


def test_a_known_model_on_a_known_machine_needs_nothing_else(plan: Plan) -> None:
    on = ("--model", "Qwen2.5-3B", "--tokens", "64x1024", "--machine", "h200-128gb")
    code, out, err = plan(*on, "--json")
    assert (code, err) == (0, "")
    read = json.loads(out)
    assert read["verdict"] == "FITS"
    decisions = read["decisions"]
    assert decisions["num_micro_batches"] * decisions["micro_batch_size"] == 64
    assert decisions["joined"] > 1  # rows pass together as far as they fit
    assert decisions["max_length"] == 1024
    assert read["step_seconds"] == pytest.approx(2.466, rel=0.15)  # as measured there
    code, out, err = plan(*on, "optimizer.master=bf16")
    assert code == 0
    assert "profile h200-128gb: measured: RAM" in out
    assert 'optimizer.master = "bf16"\n' in out
    assert "warning: `optimizer.master: bf16` rounds" in out
    assert "model.path" not in out  # nobody set it


def test_keys_without_effect_are_said_as_they_are_of_a_config(plan: Plan) -> None:
    on = ("--model", "Qwen2.5-3B", "--tokens", "1x64", "--machine", "h200-128gb")
    code, _, err = plan(*on, "store.memory=pinned", "pipeline.device=cpu")
    assert code == 0
    assert err == "note: store.memory: has no effect on the CPU: nothing is copied to a device\n"


def test_keys_that_a_plan_without_files_does_not_look_at_are_said(plan: Plan) -> None:
    on = ("--model", "smollm2-135m", "--tokens", "1x64", "--machine", "h200-128gb")
    code, _, err = plan(*on, "data.template=chatml", "model.init=random", "data.packing=true")
    assert code == 0
    assert err == (
        "note: data.template, model.init: no effect on a plan with --model, which reads no files\n"
    )
    code, out, err = plan(*on, "model.path=/elsewhere")
    assert (code, out) == (2, "")
    assert "--model names the model: leave `model.path` out, or name a config" in err


def test_what_does_not_fit_gets_priced_remedies_by_cost(plan: Plan) -> None:
    on = ("--model", "qwen2.5-7b", "--tokens", "8x1024", "--machine", "rtx3090-64gb")
    code, out, _ = plan(*on, "--json")
    assert code == 1
    read = json.loads(out)
    assert (read["fits"], read["verdict"]) == (False, "DOES NOT FIT")
    remedies = read["remedies"]
    assert remedies
    cost = [(not one["learns_the_same"], one["more_step_seconds"]) for one in remedies]
    assert cost == sorted(cost)


def test_a_picture_is_written_beside_whatever_is_printed(plan: Plan, tmp_path: Path) -> None:
    on = ("--model", "smollm2-135m", "--machine", "rtx3090-64gb", "--svg")
    path = tmp_path / "plan.svg"
    code, out, err = plan(*on, str(path), "--json")
    assert (code, err) == (0, f"picture: {path}\n")
    drawn = path.read_text(encoding="utf-8")
    assert drawn.startswith("<svg ")
    assert "smollm2-135m on NVIDIA GeForce RTX 3090" in drawn
    assert "One step" in drawn
    read = json.loads(out)
    assert all(line["owner"] in drawn for line in read["lines"])
    code, out, err = plan(*on, str(tmp_path / "none" / "plan.svg"))
    assert (code, out) == (7, "")
    assert "plan.svg cannot be written: No such file or directory. Name another place" in err


def test_a_picture_replaces_a_picture_and_nothing_else(plan: Plan, tmp_path: Path) -> None:
    on = ("--model", "smollm2-135m", "--machine", "rtx3090-64gb", "--svg")
    path = tmp_path / "run.yaml"
    path.write_text("model: {path: mine}\n")
    code, out, err = plan(*on, str(path))
    assert (code, out) == (2, "")
    assert "is no picture" in err
    assert path.read_text() == "model: {path: mine}\n"
    drawn = tmp_path / "plan.svg"
    drawn.touch()
    assert [plan(*on, str(drawn))[0] for _ in range(2)] == [0, 0]


def test_a_model_that_is_not_proved_is_planned_with_a_note(plan: Plan) -> None:
    code, _, err = plan("--model", "gemma-2-2b", "--machine", "h200-128gb", "--json")
    assert code == 0
    assert err == "note: training of Gemma2ForCausalLM is not proved: `train` refuses it\n"


def test_a_mixture_is_planned_with_both_numbers_of_parameters(plan: Plan) -> None:
    on = ("--model", "gpt-oss-20b", "--tokens", "8x1024", "--machine", "h200-1.5tb")
    code, out, err = plan(*on, "--json")
    assert code == 0
    assert err == "note: training of GptOssForCausalLM is not proved: `train` refuses it\n"
    read = json.loads(out)
    assert (read["proved"], read["parameters"]) == (False, 20914757184)
    per_second = read["tokens_per_second"]
    assert read["tflops"] == pytest.approx(6 * read["active_parameters"] * per_second / 1e12)


def test_routers_in_a_dtype_of_their_own_are_named(plan: Plan) -> None:
    _, _, err = plan("--model", "deepseek-v2-lite", "--machine", "h200-1.5tb", "--json")
    if not kept_dtypes(config_of("deepseek_v2")):
        assert "billed as" not in err
        return
    said = "3.408M of 15.71B parameters, such as `model.layers.1.mlp.gate.weight`, are kept in "
    assert f"note: {said}float32 and billed as bfloat16\n" in err


def test_a_folder_whose_training_is_not_proved_is_planned_and_not_trained(
    plan: Plan, tmp_path: Path
) -> None:
    config = MixtralConfig(hidden_size=32, intermediate_size=16, num_hidden_layers=2, vocab_size=64)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    (tmp_path / "none.jsonl").touch()
    path = tmp_path / "run.yaml"
    path.write_text(
        f"model: {{path: {tmp_path}}}\ndata: {{train: none.jsonl}}\n"
        "train: {output_dir: run, max_steps: 1}\n"
    )
    code, out, err = plan(str(path), "--machine", "h200-1.5tb")
    assert code == 0
    assert "MixtralForCausalLM, " in out
    assert err == "note: training of MixtralForCausalLM is not proved: `train` refuses it\n"
    with pytest.raises(ModelError, match=r"MixtralForCausalLM .* is not proved yet"):
        prepare(load_config(path), GPU)


def test_a_machine_file_says_when_it_was_measured(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "there.json"
    save_machine_file(measured_file(GPU, Fingerprint("cpu", 8, 64, "NVIDIA H200", "580")), path)
    code, out, _ = plan("--model", "smollm2-135m", "--machine", str(path))
    assert code == 0
    assert f"{path}, measured 2026-11-29" in out


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        ((), 2, "wanted a config file, or --model NAME"),
        (("config.yaml", "--model", "phi-4"), 2, "give one"),
        (("--model", "phi-4", "--tokens", "1024"), 2, "--tokens wants ROWSxLENGTH"),
        (("--model", "phi-4", "--tokens", "1\N{ARABIC-INDIC DIGIT THREE}x8"), 2, "--tokens wants"),
        (("--model", "phi-4", "--tokens", f"{2**60}x8", "--schedule"), 2, "fewer rows"),
        (("--model", "phi-44"), 1, "Did you mean phi-4"),
        (("--model", "Qwen/Qwen2.5-7B-Instruct"), 1, "Did you mean qwen2.5-7b"),
        (("--model", "phi-4", "--machine", "abacus"), 1, "Known are"),
        (("--model", "phi-4", "--machine", "H200-1.5GB"), 1, "Did you mean h200-1.5tb"),
        (("--model", "phi-4", "--machine", "no/such.json"), 1, "no/such.json"),
        (("--model", "phi-4", "--machine", "x" * 300), 1, "cannot be read: File name too long"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(
    plan: Plan, args: tuple[str, ...], code: int, text: str
) -> None:
    left, out, err = plan(*args)
    assert (left, out) == (code, "")
    assert text in err


def test_steps_may_be_counted_in_place_of_epochs_and_names_are_read_in_any_case(
    plan: Plan,
) -> None:
    on = ("--model", "SmolLM2-135M", "--machine", "H200-1.5TB")
    code, out, _ = plan(*on, "train.max_steps=100", "--json")
    assert code == 0
    read = json.loads(out)
    assert (read["config"]["train"]["max_steps"], read["config"]["train"]["num_epochs"]) == (
        100,
        None,
    )
    assert read["machine"]["host_source"] == "profile h200-1.5tb"
    assert read["run_seconds"] > 100 * read["step_seconds"]


def test_a_file_with_the_name_of_a_profile_comes_first(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = next(iter(known_profiles()))
    (tmp_path / name).write_text("{")
    code, _, err = plan("--model", "smollm2-135m", "--machine", name)
    assert code == 3
    assert f"{name} is not JSON" in err


def test_each_remedy_is_named_once_and_a_shortage_without_any_says_what_is_left(plan: Plan) -> None:
    on = ("--model", "qwen2.5-32b", "--machine", "rtx3090-256gb")
    code, out, _ = plan(*on, "--tokens", "64x1024")
    assert code == 1
    assert [out.count(f"`{key}: ") for key in ("data.max_length", "optimizer.master")] == [1, 1]
    assert out.count("\ndoes not fit: This run needs ") == 2
    assert " are missing.\n" in out
    # Nothing is left to change.
    masters = ("optimizer.master=bf16_stochastic", "optimizer.update=eager")
    least = (*masters, "optimizer.max_grad_norm=null", "pipeline.grad_slabs=2")
    code, out, _ = plan(*on, "--tokens", "1x1", *least)
    assert code == 1
    assert "remedy:" not in out
    assert " are missing. Use a machine with more RAM.\n" in out


def test_rows_that_divide_badly_are_warned_of(plan: Plan) -> None:
    on = ("--model", "qwen2.5-0.5b", "--machine", "h200-1.5tb", "--tokens")
    _, out, _ = plan(*on, "37x1024")
    assert "\nwarning: 37 micro-batches a step divide badly: " in out
    assert "divide badly" not in plan(*on, "37x1024", "train.micro_batch_size=37")[1]
    assert "divide badly" not in plan(*on, "38x1024")[1]


def test_one_thing_is_not_many(plan: Plan) -> None:
    on = ("--model", "smollm2-135m", "--tokens", "1x64", "--machine", "h200-128gb")
    one = ("optimizer.threads=1", "pipeline.staging_buffers=1", "pipeline.grad_slabs=1")
    _, out, _ = plan(*on, *one, "optimizer.update=eager", "optimizer.max_grad_norm=null")
    assert "updates eager on 1 thread\n" in out
    assert "\ngradients      1 slab\n" in out
    assert "\nstaging        1 buffer of " in out
