"""A run with another template than the model's own leaves it in the trained model's folder."""

from pathlib import Path
from typing import Any, cast

import pytest
from transformers import AutoTokenizer

from tests.train.command import run_command
from tests.train.workspace import make_workspace


@pytest.mark.slow
def test_the_template_of_a_run_is_that_of_the_model_it_leaves(tmp_path: Path) -> None:
    config = make_workspace(tmp_path, train={"max_steps": 1})
    (tmp_path / "own.jinja").write_text(
        "{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    done = run_command("train", config, "data.template=own.jinja")
    assert done.returncode == 0, done.stderr
    (saved,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    tokenizer = cast("Any", AutoTokenizer).from_pretrained(saved)
    assert tokenizer.chat_template == (tmp_path / "own.jinja").read_text()


@pytest.mark.slow
def test_a_template_that_is_not_there_is_said_before_anything_is_read(tmp_path: Path) -> None:
    config = make_workspace(tmp_path, train={"max_steps": 1})
    done = run_command("train", config, "data.template=missing.jinja")
    assert done.returncode == 1
    assert "data.template: there is no file `missing.jinja`" in done.stderr
