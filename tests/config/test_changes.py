"""What may change on resume: every key has a class, and nothing that matters changes unnamed."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.config.changes import (
    CLASSES,
    KINDS,
    Change,
    allowed_keys,
    check_changes,
    compare,
    is_extended,
)
from megatrain_cli.config.names import KEYS
from megatrain_cli.config.schema import TrainConfig
from megatrain_cli.errors import ConfigError, IncompatibleError

BASE: dict[str, dict[str, object]] = {
    "model": {"path": "/model"},
    "data": {"train": [{"path": "/a.jsonl"}, {"path": "/b.jsonl"}]},
    "train": {"output_dir": "/run", "max_steps": 100, "micro_batch_size": 4},
}

# Another valid value of every key.
OTHER: dict[str, object] = {
    "model.path": "/other",
    "model.init": "random",
    "model.dtype": "float32",
    "model.attention": "eager",
    "model.trust_remote_code": True,
    "data.train": "/a.jsonl",
    "data.eval": "/e.jsonl",
    "data.eval_share": 0.5,
    "data.format": "text",
    "data.template": "chatml",
    "data.on_bad_row": "skip",
    "data.max_bad_share": 0.5,
    "data.max_length": 7,
    "data.packing": True,
    "data.overlong": "drop",
    "data.train_on_prompt": True,
    "data.shuffle": False,
    "data.workers": 3,
    "data.cache_dir": "/cache",
    "train.output_dir": "/elsewhere",
    "train.max_steps": 99,
    "train.num_epochs": 2.0,
    "train.micro_batch_size": 5,
    "train.gradient_accumulation_steps": 3,
    "train.seed": 1,
    "train.deterministic": True,
    "optimizer.learning_rate": 1e-3,
    "optimizer.betas": [0.8, 0.99],
    "optimizer.eps": 1e-6,
    "optimizer.weight_decay": 0.1,
    "optimizer.max_grad_norm": None,
    "optimizer.master": "bf16",
    "optimizer.update": "eager",
    "optimizer.threads": 3,
    "schedule.type": "linear",
    "schedule.warmup_steps": 4,
    "schedule.warmup_ratio": 0.5,
    "schedule.min_lr_ratio": 0.5,
    "pipeline.device": "cpu",
    "pipeline.grad_slabs": 3,
    "pipeline.staging_buffers": 3,
    "pipeline.staging_bytes": 4096,
    "pipeline.target_pcie_utilization": 0.5,
    "pipeline.activations": {"keep_layers": 1},
    "pipeline.compile": False,
    "store.memory": "pageable",
    "checkpoint.save_steps": 3,
    "checkpoint.keep_last": 3,
    "checkpoint.keep_every_steps": 3,
    "checkpoint.async_save": False,
    "checkpoint.bounce_pool": 0,
    "checkpoint.include_gradients": True,
    "checkpoint.on_error": "warn",
    "checkpoint.on_disk_full": "skip",
    "checkpoint.grace_seconds": 3.0,
    "checkpoint.paranoid": True,
    "logging.log_steps": 2,
    "logging.tensorboard": False,
    "eval.steps": 3,
    "eval.at_start": True,
}


def config(**values: object) -> TrainConfig:
    """`BASE` with values laid over it; the dot of a key is written `__`."""
    sections = {name: dict(section) for name, section in BASE.items()}
    for name, value in values.items():
        section, _, leaf = name.partition("__")
        sections.setdefault(section, {})[leaf] = value
    return TrainConfig.model_validate(sections)


def with_other(key: str) -> TrainConfig:
    return config(**{key.replace(".", "__"): OTHER[key]})


def test_every_key_of_the_schema_has_a_class_and_nothing_else_has() -> None:
    assert list(CLASSES) == list(KEYS)
    assert set(CLASSES.values()) == set(KINDS)


@pytest.mark.parametrize("key", CLASSES)
def test_a_change_is_found_under_its_class_and_treated_by_it(key: str) -> None:
    kind = CLASSES[key]
    [change] = compare(config(), with_other(key))
    assert (change.key, change.kind) == (key, kind)
    if kind == "runtime":
        assert check_changes([change], frozenset()) == ()
        return
    with pytest.raises(IncompatibleError, match=f"^{key}: "):
        check_changes([change], frozenset())
    if kind == "meaning":
        assert check_changes([change], allowed_keys([key])) == (change,)
    else:  # not even where it is named
        with pytest.raises(IncompatibleError, match=f"^{key}: "):
            check_changes([change], frozenset({key}))


@given(st.sets(st.sampled_from(sorted(OTHER))))
def test_any_set_of_changes_is_found_whole(keys: set[str]) -> None:
    wanted = config(**{key.replace(".", "__"): OTHER[key] for key in keys})
    assert {change.key for change in compare(config(), wanted)} == keys
    assert compare(wanted, wanted) == []


def test_all_that_is_refused_is_said_at_once() -> None:
    changes = compare(config(), config(train__seed=3, optimizer__eps=1e-6, model__dtype="float32"))
    with pytest.raises(IncompatibleError) as caught:
        check_changes(changes, allowed_keys(["eps"]))
    first, second = str(caught.value).splitlines()
    assert first.startswith("model.dtype: bfloat16 -> float32: the checkpoint was made with")
    assert second == (
        "train.seed: 42 -> 3: it decides what is learnt. Leave it as it was, or add "
        "`--allow-change train.seed`"
    )


def test_a_file_that_moved_is_the_same_file_until_its_content_says_otherwise() -> None:
    moved = config(data__train=["/new/a.jsonl", "/new/b.jsonl"])
    assert [c.kind for c in compare(config(), moved)] == ["runtime"]
    other_format = config(data__train=[{"path": "/a.jsonl", "format": "text"}, "/b.jsonl"])
    [change] = compare(config(), other_format)
    assert change.kind == "meaning"
    assert "{path: /a.jsonl, format: text}" in change.text()


@pytest.mark.parametrize(("rows", "accumulation"), [(1, 4), (2, 2)])
def test_another_division_of_as_many_rows_is_free(rows: int, accumulation: int) -> None:
    wanted = config(train__micro_batch_size=rows, train__gradient_accumulation_steps=accumulation)
    assert {change.kind for change in compare(config(), wanted)} == {"runtime"}


def test_a_longer_run_needs_no_permission_and_is_recorded() -> None:
    longer = compare(config(), config(train__max_steps=200))
    assert check_changes(longer, frozenset()) == tuple(longer)
    assert is_extended(longer)
    epochs = {"train__max_steps": None, "train__num_epochs": 1}
    more = compare(config(**epochs), config(**epochs | {"train__num_epochs": 2.5}))
    assert check_changes(more, frozenset()) == tuple(more)
    for old, new in (({}, {"train__max_steps": 50}), ({}, epochs), (epochs, {})):
        shorter_or_unknown = compare(config(**old), config(**new))
        with pytest.raises(IncompatibleError, match=r"--allow-change train\."):
            check_changes(shorter_or_unknown, frozenset())
    assert not is_extended(compare(config(), config(train__seed=1)))


def test_a_key_may_be_named_by_its_last_part_where_that_is_one_key() -> None:
    assert allowed_keys(["learning_rate,train.seed", "betas"]) == {
        "optimizer.learning_rate",
        "train.seed",
        "optimizer.betas",
    }
    assert allowed_keys([]) == frozenset()


@given(st.sampled_from(sorted(CLASSES)))
def test_every_key_that_can_change_can_be_named_in_full(key: str) -> None:
    if CLASSES[key] == "identity":
        with pytest.raises(ConfigError, match="cannot change on resume"):
            allowed_keys([key])
    else:
        assert allowed_keys([key]) == {key}
    last = key.partition(".")[2]
    if Counter(k.partition(".")[2] for k in CLASSES)[last] == 1 and CLASSES[key] != "identity":
        assert allowed_keys([last]) == {key}


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("learning_rat", "there is no key `learning_rat`. Did you mean `learning_rate`?"),
        ("lr", "there is no key `lr`; this is torchtune's name for `optimizer.learning_rate`"),
        ("", "there is no key ``"),
        ("dtype", "`model.dtype` is part of what the checkpoint is"),
        ("qqqqqqqq", "there is no key `qqqqqqqq`"),
    ],
)
def test_a_word_that_names_no_key_is_refused_with_the_nearest(word: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        allowed_keys([word])
    assert str(caught.value).startswith(f"--allow-change: {message}")


def test_a_last_part_of_several_keys_names_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CLASSES, "eval.seed", "runtime")
    with pytest.raises(ConfigError, match=r"`seed` may be `train\.seed` or `eval\.seed`"):
        allowed_keys(["seed"])


def test_lineage_holds_exact_values_without_floats() -> None:
    change = Change("optimizer.betas", [0.9, 0.999], {"a": 0.5, "b": None}, "meaning")
    assert change.lineage(7) == {
        "step": 7,
        "key": "optimizer.betas",
        "old": [(0.9).hex(), (0.999).hex()],
        "new": {"a": (0.5).hex(), "b": None},
    }
    assert change.text() == "optimizer.betas: [0.9, 0.999] -> {a: 0.5}"
    assert Change("x.y", True, None, "runtime").text() == "x.y: true -> null"
