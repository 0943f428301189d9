"""The schema: frozen, strict, a sentence on each key, and defaults that are valid."""

import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from megatrain_cli.config.names import KEYS, NESTED, SECTIONS, wanted
from megatrain_cli.config.schema import (
    CheckpointSection,
    DataSource,
    KeepLayers,
    OptimizerSection,
    PipelineSection,
    Section,
    TrainConfig,
    TrainSection,
)

REQUIRED = {
    "model": {"path": "m"},
    "data": {"train": "t.jsonl"},
    "train": {"output_dir": "r", "max_steps": 1},
}


@pytest.mark.parametrize("section", [TrainConfig, DataSource, KeepLayers, *SECTIONS.values()])
def test_every_key_says_what_it_does_in_one_sentence(section: type[Section]) -> None:
    for name, field in section.model_fields.items():
        assert field.description, name
        assert field.description.endswith("."), name


@pytest.mark.parametrize("key", KEYS)
def test_every_key_can_say_what_it_wants(key: str) -> None:
    assert wanted(KEYS[key])


def test_every_key_of_a_nested_mapping_can_say_what_it_wants() -> None:
    for leaves in NESTED.values():
        assert all(wanted(annotation) for annotation in leaves.values())


def test_only_what_has_no_sensible_default_is_required() -> None:
    required = {
        f"{name}.{leaf}"
        for name, section in SECTIONS.items()
        for leaf, field in section.model_fields.items()
        if field.is_required()
    }
    assert required == {"model.path", "data.train", "train.output_dir"}


def test_the_defaults_are_those_of_the_design() -> None:
    config = TrainConfig.model_validate(REQUIRED)
    assert config.optimizer.betas == (0.9, 0.999)
    assert config.optimizer.master == "fp32_split"
    assert config.optimizer.max_grad_norm == 1.0
    assert config.pipeline.grad_slabs == 12
    assert config.pipeline.staging_buffers == 2
    assert config.model.dtype == "bfloat16"
    assert config.checkpoint.save_steps is None
    assert config.checkpoint.keep_every_steps is None
    assert config.checkpoint.bounce_pool == "auto"
    assert config.checkpoint.on_error == config.checkpoint.on_disk_full == "stop"
    assert config.checkpoint.grace_seconds == 120
    assert not config.checkpoint.include_gradients
    assert config.data.packing is False


def test_a_config_cannot_be_changed() -> None:
    config = TrainConfig.model_validate(REQUIRED)
    with pytest.raises(ValidationError):
        config.train.seed = 3  # type: ignore[misc] # frozen is what is tested


def test_the_three_ways_to_name_files_become_one() -> None:
    for value in ("a", ["a"], [{"path": "a"}]):
        config = TrainConfig.model_validate({**REQUIRED, "data": {"train": value}})
        assert [str(source.path) for source in config.data.train] == ["a"]


@given(st.floats(min_value=1, max_value=2**53).map(lambda x: float(int(x))))
def test_a_whole_number_written_with_an_exponent_is_that_number(value: float) -> None:
    section = TrainSection.model_validate({"output_dir": "r", "max_steps": value})
    assert section.max_steps == int(value)
    assert type(section.max_steps) is int


@pytest.mark.parametrize("value", [True, "4", 1.5, 0, -1, float("inf"), float("nan"), None, [4]])
def test_what_is_no_count_is_refused(value: object) -> None:
    with pytest.raises(ValidationError):
        TrainSection.model_validate({"output_dir": "r", "micro_batch_size": value})


BAD: dict[type[Section], dict[str, list[object]]] = {
    CheckpointSection: {
        "save_steps": [0, -1, "auto"],
        "keep_last": [0, -1, None],  # CKP-06: nobody means that all are deleted
        "keep_every_steps": [0],
        "bounce_pool": [-1, "2 pages", "0.5GiBB", None, True],
        "include_gradients": ["yes", 1],
        "on_error": ["retry", None],
        "on_disk_full": ["ignore", True],
        "grace_seconds": [0, -1, "120"],
        "paranoid": [1],
    },
    OptimizerSection: {
        "learning_rate": [-1e-9, float("inf"), float("nan"), "1e-5", True, None],
        "betas": [[0.9, 1.0], [-0.1, 0.9], [0.9], [0.9, 0.9, 0.9], 0.9, ["0.9", 0.9]],
        "eps": [0, -1, float("nan")],
        "weight_decay": [-0.1, float("inf")],
        "max_grad_norm": [0, -1, float("inf")],
        "threads": [0, "all", True],
    },
    PipelineSection: {
        "device": ["gpu", "cuda:", "cuda:-1", "cuda:01", "cpu\n", 0],
        "grad_slabs": [0, "many"],
        "staging_buffers": [0],
        "target_pcie_utilization": [0, 1.01],
        "activations": ["none", {"keep_layers": -1}, {"offload": True}, {"keep_layers": 1, "x": 1}],
        "compile": ["yes", 1],
    },
}


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        (s, key, value)
        for s, keys in BAD.items()
        for key, values in keys.items()
        for value in values
    ],
)
def test_values_out_of_range_are_refused(section: type[Section], key: str, value: object) -> None:
    with pytest.raises(ValidationError):
        section.model_validate({key: value})


def test_every_literal_of_the_schema_is_text() -> None:
    for annotation in KEYS.values():
        if typing.get_origin(annotation) is typing.Literal:
            assert all(isinstance(word, str) for word in typing.get_args(annotation))
