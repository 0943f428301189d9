"""A checkpoint is a model's folder: its tokenizer, its templates, and where its answers end."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig

from megatrain_cli.checkpoint.model_files import model_files
from megatrain_cli.errors import ModelError
from tests.data.templates import FAMILIES, make_tokenizer

CONFIG = {"dtype": "float32", "bos_token_id": 1, "eos_token_id": 2}


def folder(tmp_path: Path, generation: object = None) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    if generation is not None:
        text = generation if isinstance(generation, str) else json.dumps(generation)
        (tmp_path / "generation_config.json").write_text(text)
    return tmp_path


def generation_of(source: Path, *stop_ids: int) -> Any:
    raw = model_files(source, torch.float32, stop_ids).get("generation_config.json")
    return None if raw is None else json.loads(raw)


@pytest.mark.parametrize(
    ("had", "learnt", "has"),
    [
        (2, (7,), [2, 7]),
        ([2, 5], (7, 2, 8), [2, 5, 7, 8]),
        (None, (7,), [7]),
    ],
)
def test_what_was_learnt_to_end_with_is_added_and_all_else_stays(
    had: object, learnt: tuple[int, ...], has: list[int], tmp_path: Path
) -> None:
    rest = {"temperature": 0.6, "do_sample": True, "transformers_version": "5.17.0"}
    generation = rest | ({} if had is None else {"eos_token_id": had})
    found = generation_of(folder(tmp_path, generation), *learnt)
    assert found == rest | {"eos_token_id": has}


def test_a_config_that_names_them_stays_byte_for_byte(tmp_path: Path) -> None:
    raw = '{"eos_token_id":   [2, 7]}'
    files = model_files(folder(tmp_path, raw), torch.float32, (7, 2))
    assert files["generation_config.json"] == raw.encode()
    assert files["config.json"] == (tmp_path / "config.json").read_bytes()


def test_without_one_it_is_made_of_what_transformers_would_take(tmp_path: Path) -> None:
    assert generation_of(folder(tmp_path), 2) is None
    found = generation_of(folder(tmp_path), 2, 7)
    assert found == {"bos_token_id": 1, "eos_token_id": [2, 7]}
    (tmp_path / "generation_config.json").write_text(json.dumps(found))
    loaded = cast("Any", GenerationConfig).from_pretrained(tmp_path)
    assert (loaded.bos_token_id, loaded.eos_token_id) == (1, [2, 7])


@pytest.mark.parametrize(
    ("raw", "said"), [("{", "no JSON: "), ("[" * 100_000, "no JSON: "), ("[]", "no JSON object")]
)
def test_one_that_cannot_be_read_is_refused_by_name(raw: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"generation_config\.json .* {said}"):
        generation_of(folder(tmp_path, raw), 7)


@pytest.mark.parametrize("ordinary", [True, False])
def test_a_tokenizer_with_several_templates_keeps_them_all(ordinary: bool, tmp_path: Path) -> None:
    template, eos, _, _ = FAMILIES["chatml"]
    tokenizer = make_tokenizer(template, eos)
    tokenizer.chat_template = {"tool_use": "{{ 'tools' }}", "rag": "{{ 'rag\n' }}\n"}
    if ordinary:
        tokenizer.chat_template |= {"default": template}
    source, target = tmp_path / "source", tmp_path / "target"
    tokenizer.save_pretrained(source)
    folder(source)
    target.mkdir()
    for name, raw in model_files(source, torch.float32).items():
        (target / name).write_bytes(raw)
    loads = cast("Any", AutoTokenizer)
    wanted = loads.from_pretrained(source).chat_template
    assert len(wanted) == 2 + ordinary
    assert loads.from_pretrained(target).chat_template == wanted
