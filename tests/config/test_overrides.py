"""Overrides: dotted `key=value`, read as YAML, checked with the file, located as themselves."""

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatrain_cli.config.kinds import MAX_INT
from megatrain_cli.config.schema import KeepLayers
from tests.config.conftest import Load, Problems


def test_an_override_wins_over_the_file_and_counts_as_explicit(load: Load) -> None:
    loaded = load("optimizer: {eps: 1e-6}\n", "optimizer.eps=1e-7", "data.shuffle=false")
    assert loaded.config.optimizer.eps == 1e-7
    assert loaded.config.data.shuffle is False
    assert {"optimizer.eps", "data.shuffle"} <= loaded.explicit
    assert loaded.overrides == ("optimizer.eps=1e-7", "data.shuffle=false")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 10**6), st.floats(0, 1), st.booleans())
def test_an_override_equals_the_same_line_in_the_file(
    load: Load, steps: int, decay: float, shuffle: bool
) -> None:
    values = {
        "logging": {"log_steps": steps},
        "optimizer": {"weight_decay": decay},
        "data": {"train": "train.jsonl", "shuffle": shuffle},
    }
    start = "model: {path: model}\ntrain: {output_dir: run, max_steps: 4}\n"
    in_file = load(yaml.safe_dump(values), start=start)
    overrides = (
        f"logging.log_steps={steps}",
        f"optimizer.weight_decay={decay!r}",
        f"data.shuffle={str(shuffle).lower()}",
    )
    assert load("", *overrides).config == in_file.config


def test_values_may_be_lists_mappings_and_null(load: Load) -> None:
    config = load(
        "",
        "optimizer.betas=[0.8, 0.95]",
        "pipeline.activations={keep_layers: 2}",
        "optimizer.max_grad_norm=null",
        "data.train=[a.jsonl, b.jsonl]",
    ).config
    assert config.optimizer.betas == (0.8, 0.95)
    assert config.optimizer.max_grad_norm is None
    assert len(config.data.train) == 2


def test_a_deeper_key_replaces_a_word_or_extends_a_mapping(load: Load) -> None:
    text = "pipeline: {activations: keep}\n"
    key = "pipeline.activations"
    activations = load(
        text, f"{key}.keep_layers=3", f"{key}.offload=true"
    ).config.pipeline.activations
    assert activations == KeepLayers(keep_layers=3, offload=True)


@pytest.mark.parametrize(
    ("text", "size"),
    [("500MB", 500 * 10**6), ("1.5 GiB", 3 << 29), ("2e5", 200_000), ("0", 0), ("auto", "auto")],
)
def test_a_size_may_have_its_unit(load: Load, text: str, size: int | str) -> None:
    assert load("", f"checkpoint.bounce_pool={text}").config.checkpoint.bounce_pool == size


def test_an_empty_value_is_null(load: Load) -> None:
    assert load("", "optimizer.max_grad_norm=").config.optimizer.max_grad_norm is None


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.seed=-1", "train.seed: wanted a whole number of at least 0, got -1"),
        (
            "train.seed=18446744073709551616",
            f"train.seed: wanted a whole number of at least 0, and at most {MAX_INT}, got {2**64}",
        ),
        (
            f"optimizer.eps={10**40}",
            f"optimizer.eps: wanted a number from 1e-30 to 1e30, got 1{'0' * 40}",
        ),
        (
            "optimizer.threads=2000",
            "optimizer.threads: wanted a whole number from 1 to 1024 or `auto`, got 2000",
        ),
        (
            "checkpoint.bounce_pool=2 pages",
            "checkpoint.bounce_pool: wanted a whole number of at least 0, a size such as 512MiB",
        ),
        ("train.sed=1", "train.sed: unknown key. Did you mean `seed`?"),
        ("seed=1", "seed: not here; it belongs at `train.seed`"),
        ("lr=1", "lr: unknown key; this is torchtune's name for `optimizer.learning_rate`"),
        ("store=pinned", "store: wanted keys below it (memory), got the text 'pinned'"),
        ("optimizer.eps=[", "not valid YAML: expected the node content, but found '<stream end>'"),
        ("train.seed", "wanted `section.key=value`"),
        ("=1", "wanted `section.key=value`"),
        ("train..seed=1", "wanted `section.key=value`"),
        ("data.train={path: a, path: b}", "path: written twice; it already stands in line 1"),
    ],
)
def test_a_wrong_override_is_located_as_itself(
    problems: Problems, override: str, expected: str
) -> None:
    [problem] = problems("", override)
    assert problem.startswith(f"override `{override}`: {expected}")


def test_a_key_cannot_be_given_twice(problems: Problems) -> None:
    assert problems("", "train.seed=1", "train.seed=2") == [
        "override `train.seed=2`: train.seed: given twice on the command line. Keep one"
    ]


@pytest.mark.parametrize(
    "words",
    [
        ("pipeline.activations.keep_layers=2", "pipeline.activations=keep"),
        ("pipeline.activations.keep_layers=2", "pipeline.activations={keep_layers: 1}"),
    ],
)
def test_no_override_undoes_one_before_it(problems: Problems, words: tuple[str, str]) -> None:
    [problem] = problems("", *words)
    assert problem == (
        f"override `{words[1]}`: pipeline.activations: would undo "
        f"`{words[0].partition('=')[0]}`, given before it. Keep one"
    )


@pytest.mark.parametrize("value", ["{type: linear}", "null", ""])
def test_a_section_is_not_replaced_as_a_whole(problems: Problems, value: str) -> None:
    """What the file has in it would be gone without a word."""
    [problem] = problems("schedule: {warmup_steps: 3}\n", f"schedule={value}")
    assert problem == (
        f"override `schedule={value}`: schedule: a section; change its keys, as "
        "`schedule.KEY=VALUE`"
    )


def test_every_wrong_override_is_reported_beside_the_file(problems: Problems) -> None:
    found = problems("store: {memory: ram}\n", "train.seed=x", "a.b=1", "model.dtype=bf16")
    assert [problem.partition(": ")[0] for problem in found] == [
        "config.yaml:4",
        "override `a.b=1`",
        "override `model.dtype=bf16`",
        "override `train.seed=x`",
    ]
    assert found[2].endswith("Did you mean `bfloat16`?")
