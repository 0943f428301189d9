"""A run with another template than the model's own leaves it in the trained model's folder."""

from pathlib import Path
from typing import Any, cast

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from megatrain_cli.cli.app import app
from megatrain_cli.errors import ConfigError
from tests.train.here import resume_here, train_here
from tests.train.workspace import make_workspace


def test_the_template_of_a_run_is_that_of_the_model_it_leaves_and_of_its_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its answers end with another token than texts do: who lets the model write must know."""
    own = tmp_path / "own.jinja"
    own.write_text(
        "{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_start|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    text = own.read_text()
    config = make_workspace(tmp_path, train={"max_steps": 1}, data={"template": "own.jinja"})
    train_here(config)
    own.unlink()
    resume_here(tmp_path / "run", steps=2)
    assert f"{own}: the chat template cannot be read" in capsys.readouterr().err
    for saved in sorted((tmp_path / "run" / "checkpoints").glob("step-*")):
        tokenizer = cast("Any", AutoTokenizer).from_pretrained(saved)
        assert tokenizer.chat_template == text
        model = cast("Any", AutoModelForCausalLM).from_pretrained(saved)
        end = tokenizer.convert_tokens_to_ids("<|im_start|>")
        assert end != tokenizer.eos_token_id
        assert end in model.generation_config.eos_token_id


def test_a_template_that_is_not_there_is_said_before_anything_is_read(tmp_path: Path) -> None:
    config = make_workspace(tmp_path, train={"max_steps": 1})
    (tmp_path / "train.jsonl").write_text("no JSON")
    done = CliRunner().invoke(app, ["train", str(config), "data.template=missing.jinja"])
    assert isinstance(done.exception, ConfigError)
    assert "data.template: there is no file `missing.jinja`" in str(done.exception)
