"""Loading: every problem at once, as `file:line: dotted.key: problem. Did you mean ...?`."""

from pathlib import Path

import pytest

from megatrain_cli.config.load import load_config
from megatrain_cli.config.names import KEYS
from megatrain_cli.errors import ConfigError
from tests.config.conftest import Load, Problems


def test_a_minimal_file_is_valid_and_the_rest_is_default(load: Load) -> None:
    loaded = load()
    assert loaded.config.train.max_steps == 4
    assert loaded.explicit == {"model.path", "data.train", "train.output_dir", "train.max_steps"}
    assert loaded.notes == ()


def test_exponents_are_numbers_with_and_without_a_dot(load: Load) -> None:
    """CFG-01: YAML 1.1 reads these as texts."""
    text = "optimizer: {learning_rate: 1e-5, eps: 1E-8, weight_decay: +1e-2}\ndata: {train: a}\n"
    start = "model: {path: m}\ntrain: {output_dir: r, max_steps: 2e5, micro_batch_size: 1.0e1}\n"
    config = load(text, start=start).config
    optimizer = config.optimizer
    assert (optimizer.learning_rate, optimizer.eps, optimizer.weight_decay) == (1e-5, 1e-8, 1e-2)
    assert (config.train.max_steps, config.train.micro_batch_size) == (200_000, 10)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "optimizer:\n  wieght_decay: 0.1\n",
            "config.yaml:5: optimizer.wieght_decay: unknown key. Did you mean `weight_decay`?",
        ),
        (
            "max_length: 5\n",
            "config.yaml:4: max_length: not here; it belongs at `data.max_length`",
        ),
        (
            "optimizer: {max_length: 5}\n",
            "config.yaml:4: optimizer.max_length: not here; it belongs at `data.max_length`",
        ),
        (
            "logging: {steps: 5}\n",
            "config.yaml:4: logging.steps: unknown key. Did you mean `log_steps`?",
        ),
        (
            "checkpoint: {steps: 5}\n",
            (
                "config.yaml:4: checkpoint.steps: unknown key. Did you mean `save_steps` or"
                " `keep_every_steps`?"
            ),
        ),
        (
            "completion_only_loss: true\n",
            (
                "config.yaml:4: completion_only_loss: unknown key; this is TRL's name for"
                " `data.train_on_prompt`"
            ),
        ),
        (
            "packing_strategy: bfd\n",
            (
                "config.yaml:4: packing_strategy: unknown section. Known here: model, data, train, "
                "optimizer, schedule, pipeline, store, checkpoint, logging, eval"
            ),
        ),
        (
            "lr_scheduler: cosine\n",
            "config.yaml:4: lr_scheduler: unknown key; this is axolotl's name for `schedule.type`",
        ),
        (
            "pipline: {}\n",
            "config.yaml:4: pipline: unknown section. Did you mean `pipeline`?",
        ),
        (
            "data.shuffle: true\n",
            "config.yaml:4: data.shuffle: write `shuffle` on a line of its own below `data:`",
        ),
        (
            "weigth_decay: 1\n",
            "config.yaml:4: weigth_decay: unknown key. Did you mean `optimizer.weight_decay`?",
        ),
        (
            "store: {color: red}\n",
            "config.yaml:4: store.color: unknown key. Known here: memory",
        ),
    ],
)
def test_a_key_that_is_not_known_is_refused_with_what_was_meant(
    problems: Problems, text: str, expected: str
) -> None:
    """CFG-02: misspelled, misplaced and borrowed keys used to do nothing."""
    assert problems(text) == [expected]


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("name_or_path", "model.path"),
        ("per_device_train_batch_size", "train.micro_batch_size"),
        ("num_train_epochs", "train.num_epochs"),
        ("cutoff_len", "data.max_length"),
        ("lr_scheduler_type", "schedule.type"),
        ("lr", "optimizer.learning_rate"),
    ],
)
def test_names_of_other_tools_are_known_in_every_section(
    problems: Problems, name: str, key: str
) -> None:
    for section in ("store", "optimizer"):
        [problem] = problems(f"{section}: {{{name}: 1}}\n")
        assert f"{section}.{name}: unknown key; this is" in problem
        assert problem.endswith(f"name for `{key}`")


def test_every_problem_is_reported_at_once_in_the_order_of_the_file(problems: Problems) -> None:
    text = """\
optimizer:
  learning_rate: fast
  betas: [0.9, 1.5]
  wieght_decay: 0.1
pipline:
  grad_slab: 3
  staging_buffers: 0
data:
  format: alpacca
"""
    start = "train: {micro_batch_size: -2, max_steps: 1}\n"
    assert problems(text, "train.seed=-1", start=start) == [
        "config.yaml: model.path: missing; wanted a path",
        "config.yaml:1: train.output_dir: missing; wanted a path",
        "config.yaml:1: train.micro_batch_size: wanted a whole number of at least 1, got -2",
        (
            "config.yaml:3: optimizer.learning_rate: wanted a number from 0 to 1e30, got"
            " the text 'fast'"
        ),
        (
            "config.yaml:4: optimizer.betas: wanted two numbers such as [0.9, 0.999], each at least"
            " 0 and below 1, got [0.9, 1.5]"
        ),
        "config.yaml:5: optimizer.wieght_decay: unknown key. Did you mean `weight_decay`?",
        "config.yaml:6: pipline: unknown section. Did you mean `pipeline`?",
        "config.yaml:7: pipeline.grad_slab: unknown key. Did you mean `grad_slabs`?",
        "config.yaml:8: pipeline.staging_buffers: wanted a whole number of at least 1, got 0",
        (
            "config.yaml:9: data.train: missing; wanted a path, a list of paths, or a list of"
            " {path, format}"
        ),
        (
            "config.yaml:10: data.format: wanted `auto`, `alpaca`, `sharegpt`, `messages`,"
            " `prompt_completion`, `text` or `tokenized`, got the text 'alpacca'."
            " Did you mean `alpaca`?"
        ),
        "override `train.seed=-1`: train.seed: wanted a whole number of at least 0, got -1",
    ]


def test_a_misspelled_key_is_not_reported_as_missing_too(problems: Problems) -> None:
    start = "modle: {path: m}\ndata: {trian: t}\ntrain: {output_dir: r, max_step: 3}\n"
    assert problems(start=start) == [
        "config.yaml:1: modle: unknown section. Did you mean `model`?",
        "config.yaml:2: data.trian: unknown key. Did you mean `train`?",
        "config.yaml:3: train.max_step: unknown key. Did you mean `max_steps`?",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "{keep_layers: -1}",
            "activations.keep_layers: wanted a whole number of at least 0, got -1",
        ),
        (
            "{keep_layers: 1, ofload: true}",
            "activations.ofload: unknown key. Did you mean `offload`?",
        ),
        ("{keep_layers: 1, offload: 1}", "activations.offload: wanted `true` or `false`, got 1"),
        ("[1]", "activations: wanted `auto`, `recompute`, `keep` or {keep_layers: N, offload:"),
        ("kep", "got the text 'kep'. Did you mean `keep`?"),
    ],
)
def test_mistakes_in_a_union_are_named_without_inner_names(
    problems: Problems, text: str, expected: str
) -> None:
    [problem] = problems(f"pipeline:\n  activations: {text}\n")
    assert problem.startswith("config.yaml:5: pipeline.activations")
    assert expected in problem


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train: []", "2: data.train: wanted a path, a list of paths, or a list of {path, format}"),
        ("train: ''", "2: data.train: wanted a path, a list of paths, or a list of {path, format}"),
        ("train: 5", "2: data.train: wanted a path, a list of paths, or a list of {path, format}"),
        ("train:\n  - a\n  - 5", "4: data.train[1]: wanted a path, a list of paths"),
        ("train: [a, {path: b, format: cvs}]", "2: data.train[1].format: wanted `auto`, "),
        ("train:\n  - path: b\n    fromat: text", "4: data.train[0].fromat: unknown key. Did you"),
        ("train:\n  - format: text", "3: data.train[0]: wanted a path"),
    ],
)
def test_mistakes_in_list_entries_are_named_by_position_and_line(
    problems: Problems, text: str, expected: str
) -> None:
    rest = "model: {path: m}\ntrain: {output_dir: r, max_steps: 1}\n"
    [problem] = problems(rest, start=f"data:\n  {text.replace(chr(10), chr(10) + '  ')}\n")
    assert problem.startswith(f"config.yaml:{expected}")


@pytest.mark.parametrize("section", ["model", "train", "pipeline"])
def test_a_section_that_is_no_mapping_gives_one_problem(problems: Problems, section: str) -> None:
    keep = "".join(
        line + "\n"
        for line in (
            "model: {path: m}",
            "data: {train: t}",
            "train: {output_dir: r, max_steps: 1}",
        )
        if not line.startswith(section)
    )
    [problem] = problems(start=f"{section}: some text\n{keep}")
    assert problem.startswith(f"config.yaml:1: {section}: wanted keys below it (")


def test_a_section_with_all_keys_commented_out_is_default(load: Load) -> None:
    assert load("pipeline:\n  # device: cpu\n").config.pipeline.device == "auto"


def test_a_doubled_key_is_refused_beside_other_problems(problems: Problems) -> None:
    text = "optimizer:\n  eps: 1e-8\n  eps: 1e-6\n  lr: 1\n"
    assert [problem.partition(": ")[0] for problem in problems(text)] == [
        "config.yaml:6",
        "config.yaml:7",
    ]


@pytest.mark.parametrize("key", KEYS)
def test_null_is_accepted_or_refused_by_name_for_every_key(load: Load, key: str) -> None:
    try:
        load("", f"{key}=null")
    except ConfigError as error:
        [problem] = error.problems
        assert problem.startswith(f"override `{key}=null`: {key}: ")


@pytest.mark.parametrize("key", KEYS)
def test_a_mapping_of_nonsense_is_refused_by_name_for_every_key(load: Load, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load("", f"{key}={{nonsense: 1}}")
    assert all(f": {key}" in problem for problem in caught.value.problems)


def test_a_file_that_is_not_there_says_where_it_was_sought(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: there is no such config file"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match=r"resolved to /"):
        load_config(Path("none.yaml"))
    with pytest.raises(ConfigError, match="this is a folder"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "wanted sections such as `model:`, `data:` and `train:`, got nothing"),
        (b"# nothing\n", "got nothing"),
        (b"- a\n", "got ['a']"),
        (b"text\n", "got the text 'text'"),
        (b"model:\n  path: \xff\n", "config.yaml:2: not UTF-8 text; save the file as UTF-8"),
        (b"model:\n\tpath: a\n", "config.yaml:2: not valid YAML: a tab; indent with spaces"),
    ],
)
def test_what_is_no_config_at_all_gives_one_clear_line(
    tmp_path: Path, raw: bytes, message: str
) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(raw)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    [problem] = caught.value.problems
    assert message in problem
    assert "\n" not in problem


def test_a_byte_order_mark_and_windows_line_ends_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(
        b"\xef\xbb\xbfmodel: {path: m}\r\ndata: {train: t}\r\n"
        b"train:\r\n  output_dir: r\r\n  max_steps: 2\r\n"
    )
    assert load_config(path).config.train.max_steps == 2
