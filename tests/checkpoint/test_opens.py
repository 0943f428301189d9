"""`--open`: the model of config.json has the checkpoint's layers, names, shapes and ties."""

import json
from pathlib import Path

import pytest

from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.checkpoint.inspect import Inspection, inspect_checkpoint
from megatrain_cli.checkpoint.opens import check_opens
from tests.checkpoint.made import make_checkpoint, random_layers
from tests.checkpoint.made_model import make_model_checkpoint


def look(folder: Path) -> Inspection:
    return inspect_checkpoint(folder, FileSystem(), more=[("model", check_opens)])


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_of_a_model_opens_as_that_model(tmp_path: Path, kind: str, tied: bool) -> None:
    make_model_checkpoint(tmp_path / "x", kind, tied=tied)
    assert look(tmp_path / "x").problems == ()


def other_config(folder: Path, **changes: object) -> dict[str, bytes]:
    """What `config.json` of a model in `folder` would be with some values changed."""
    make_model_checkpoint(folder)
    config = json.loads((folder / "config.json").read_bytes())
    return {"config.json": json.dumps(config | changes).encode()}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 3}, "it has the layers"),
        ({"intermediate_size": 80}, "mlp.up_proj.weight' has the shape"),
        ({"tie_word_embeddings": True}, "'lm_head.weight' has the shape None there"),
        ({"attention_bias": True}, r"q_proj.bias' has the shape"),
        ({"hidden_act": "no such function"}, "no model can be made"),
        ({"model_type": "no such model"}, "no model can be made"),
        ({"vocab_size": 100}, "the tokenizer has 258 tokens, the model 100"),
    ],
)
def test_a_config_of_another_model_is_incompatible(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    make_model_checkpoint(tmp_path / "x", extra=other_config(tmp_path / "y", **changes))
    found = look(tmp_path / "x")
    assert found.exit_code == 4
    assert any(words in str(problem) for problem in found.problems), found.problems


def test_other_ties_than_the_models_are_told(tmp_path: Path) -> None:
    make_model_checkpoint(tmp_path / "x", tied=True, told_tied=())
    found = look(tmp_path / "x")
    assert "tied weights are" in str(found.problems[0])


def test_a_damaged_file_is_told_before_it_is_parsed(tmp_path: Path) -> None:
    make_model_checkpoint(tmp_path / "x")
    path = tmp_path / "x" / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    found = look(tmp_path / "x")
    assert found.exit_code == 3
    assert "tokenizer.json" in str(found.problems[0])


def test_a_tokenizer_that_does_not_load_is_told(tmp_path: Path) -> None:
    make_model_checkpoint(tmp_path / "x", extra={"tokenizer.json": b"{}"})
    found = look(tmp_path / "x")
    assert found.exit_code == 4
    assert "the tokenizer does not load" in str(found.problems[0])


def test_without_a_tokenizer_none_is_asked_for(tmp_path: Path) -> None:
    make_model_checkpoint(tmp_path / "y")
    config = {"config.json": (tmp_path / "y" / "config.json").read_bytes()}
    make_checkpoint(tmp_path / "x", random_layers(), aux=config)
    problems = [str(problem) for problem in look(tmp_path / "x").problems]
    assert problems
    assert not any("the tokenizer" in problem for problem in problems)
