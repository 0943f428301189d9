"""A run with another template than the model's own leaves it in the trained model's folder."""

from pathlib import Path
from typing import Any, cast

from transformers import AutoTokenizer
from typer.testing import CliRunner

from megatrain_cli.cli.app import app
from megatrain_cli.errors import ConfigError
from tests.train.here import train_here
from tests.train.workspace import make_workspace


def test_the_template_of_a_run_is_that_of_the_model_it_leaves(tmp_path: Path) -> None:
    config = make_workspace(tmp_path, train={"max_steps": 1})
    (tmp_path / "own.jinja").write_text(
        "{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    train_here(config, "data.template=own.jinja")
    (saved,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    tokenizer = cast("Any", AutoTokenizer).from_pretrained(saved)
    assert tokenizer.chat_template == (tmp_path / "own.jinja").read_text()


def test_a_template_that_is_not_there_is_said_before_anything_is_read(tmp_path: Path) -> None:
    config = make_workspace(tmp_path, train={"max_steps": 1})
    (tmp_path / "train.jsonl").write_text("no JSON")
    done = CliRunner().invoke(app, ["train", str(config), "data.template=missing.jinja"])
    assert isinstance(done.exception, ConfigError)
    assert "data.template: there is no file `missing.jinja`" in str(done.exception)
