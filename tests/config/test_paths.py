"""Paths: one base, the config file's folder, wherever the command runs; `~` and `${NAME}`."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatrain_cli.config.load import check_paths, dump_config, load_config
from megatrain_cli.config.paths import PATH_KEYS
from megatrain_cli.config.schema import TrainConfig
from megatrain_cli.errors import ConfigError
from tests.config.conftest import Load, Problems
from tests.others import OTHERS, make_other


def missing(load: Load, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check_paths(load("", *overrides))
    return list(caught.value.problems)


def test_relative_paths_start_at_the_config_file_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CFG-04: the same config means the same files, whatever the current folder is."""
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    project.mkdir()
    elsewhere.mkdir()
    (project / "config.yaml").write_text(
        "model: {path: ../tiny}\ndata: {train: [train.jsonl, {path: more/b.jsonl}]}\n"
        "train: {output_dir: out, max_steps: 1}\n"
    )
    monkeypatch.chdir(elsewhere)
    far = load_config(Path("../project/config.yaml"))
    monkeypatch.chdir(project)
    near = load_config(Path("config.yaml"))
    assert far.config == near.config
    assert near.config.model.path == tmp_path / "tiny"
    files = [source.path for source in near.config.data.train]
    assert files == [project / "train.jsonl", project / "more/b.jsonl"]
    assert near.config.train.output_dir == project / "out"


def test_paths_of_overrides_start_there_too(load: Load, tmp_path: Path) -> None:
    assert load("", "train.output_dir=x/y").config.train.output_dir == tmp_path / "x/y"


def test_home_and_variables_are_expanded(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere/home")
    monkeypatch.setenv("DATA_ROOT", "/data")
    config = load("", "train.output_dir=~/run", "data.train=${DATA_ROOT}/a.jsonl").config
    assert config.train.output_dir == Path("/somewhere/home/run")
    assert config.data.train[0].path == Path("/data/a.jsonl")


def test_a_doubled_dollar_sign_stands_for_itself_before_a_brace(load: Load) -> None:
    config = load("", "train.output_dir=/a$b/$${HOME}", "data.train=$${").config
    assert config.train.output_dir == Path("/a$b/${HOME}")
    assert config.data.train[0].path.name == "${"


def test_an_unset_variable_is_named(problems: Problems, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH", raising=False)
    [problem] = problems("", "data.train=[a, '${NO_SUCH}/b']")
    assert "data.train[1]: the environment variable `NO_SUCH` is not set" in problem


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("${EMPTY}/run", "the environment variable `EMPTY` is empty"),
        ("${EMPTY}", "the environment variable `EMPTY` is empty"),
        ("$SCRATCH/run", "`$SCRATCH` is not expanded; write `${SCRATCH}`"),
        ("a/$USER/run", "`$USER` is not expanded; write `${USER}`"),
    ],
)
def test_a_variable_never_becomes_another_folder_than_was_meant(
    problems: Problems, monkeypatch: pytest.MonkeyPatch, path: str, reason: str
) -> None:
    monkeypatch.setenv("EMPTY", "")
    [problem] = problems("", f"train.output_dir={path}")
    assert f"train.output_dir: {reason}" in problem


def test_a_dollar_within_a_name_is_a_dollar(load: Load, tmp_path: Path) -> None:
    run = load("", "train.output_dir=cost$5/a$b").config.train.output_dir
    assert run == tmp_path / "cost$5/a$b"


def test_an_unknown_home_is_named(problems: Problems) -> None:
    [problem] = problems("", "model.path=~no-such-user-here/m")
    assert "model.path: the home folder of ~no-such-user-here is not known" in problem


def test_what_may_be_a_hub_id_is_kept_as_it_is(load: Load, tmp_path: Path) -> None:
    assert load("", "model.path=org/name").config.model.path == Path("org/name")
    (tmp_path / "org/name").mkdir(parents=True)
    assert load("", "model.path=org/name").config.model.path == tmp_path / "org/name"


def test_every_missing_path_is_shown_as_given_and_as_resolved(load: Load, tmp_path: Path) -> None:
    found = missing(load, "data.train=[a.jsonl, /none/b.jsonl]")
    assert found == [
        (
            f"{tmp_path}/config.yaml:1: model.path: there is no model folder `model` (resolved to"
            f" {tmp_path}/model)"
        ),
        (
            "override `data.train=[a.jsonl, /none/b.jsonl]`: data.train[0]: there is no file"
            f" `a.jsonl` (resolved to {tmp_path}/a.jsonl)"
        ),
        (
            "override `data.train=[a.jsonl, /none/b.jsonl]`: data.train[1]: there is no file"
            " `/none/b.jsonl`"
        ),
    ]


@pytest.mark.parametrize(
    ("key", "text", "remedy"),
    [
        ("data.train", "rows/*.jsonl", ". Patterns are not expanded: name a folder, or a list"),
        ("data.eval", "rows/[ab].jsonl", ". Patterns are not expanded: name a folder, or a list"),
        ("data.train", "https://host/a.jsonl", ". Addresses are not read: download it"),
        ("data.train", "file:///data/a.jsonl", ". Addresses are not read: download it"),
        ("model.path", "https://host/org/name", ". Addresses are not read: download it"),
        ("data.train", "a.jsonl,b.jsonl", ". Several files are a list: [a.jsonl, b.jsonl]"),
        (
            "model.path",
            "Org/Name-7B",
            ". If that is a model of a hub: none is downloaded here. Fetch",
        ),
    ],
)
def test_what_is_no_path_but_looks_like_one_is_told_what_to_do(
    load: Load, key: str, text: str, remedy: str
) -> None:
    [problem] = [p for p in missing(load, f"{key}={text}") if text in p]
    assert remedy in problem


def test_paths_of_the_wrong_kind_are_refused(load: Load, tmp_path: Path) -> None:
    (tmp_path / "model").write_text("")
    (tmp_path / "train.jsonl").mkdir()
    (tmp_path / "run").write_text("")
    found = missing(load)
    assert "is a file; name the model's folder" in found[0]
    assert "is a file; name a folder" in found[1]


@pytest.mark.parametrize(
    ("name", "reason"),
    [("x" * 5000, "File name too long"), ("loop/a", "Too many levels of symbolic links")],
)
def test_a_path_that_cannot_even_be_looked_at_is_refused(
    load: Load, tmp_path: Path, name: str, reason: str
) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for key in ("model.path", "data.train", "train.output_dir"):
        assert any(
            f"{key}: `{name}`" in problem and f"cannot be used: {reason}" in problem
            for problem in missing(load, f"{key}={name}")
        )


def test_a_run_cannot_go_into_the_folder_of_its_model(load: Load, tmp_path: Path) -> None:
    """Its lock, config and metrics would lie among the model's files and be saved with them."""
    (tmp_path / "model").mkdir()
    (tmp_path / "train.jsonl").write_text("")
    (tmp_path / "link").symlink_to("model")
    [problem] = missing(load, "train.output_dir=link")
    assert problem.endswith("is the model's folder; name another")


def test_paths_that_exist_pass(load: Load, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "train.jsonl").write_text("")
    check_paths(load())


characters = st.characters(codec="utf-8", exclude_characters="/\\", exclude_categories=["Cc"])
names = st.text(characters) | st.sampled_from(
    ["~", "$HOME", "${HOME}", "$${HOME}", "$$${", "${a${b}"]
)
paths = st.lists(names.filter(lambda n: n not in {"", ".", ".."}), min_size=1, max_size=3).map(
    lambda parts: "/" + "/".join(parts)
)
numbers = st.floats(0, 1e30)
configs = st.builds(
    lambda model, data, out, length, optimizer, activations, schedule: {
        "model": {"path": model},
        "data": {"train": data},
        "train": {"output_dir": out, **length},
        "optimizer": optimizer,
        "pipeline": {"activations": activations},
        "schedule": {"type": schedule},
    },
    paths,
    paths | st.lists(paths | paths.map(lambda p: {"path": p, "format": "text"}), min_size=1),
    paths,
    st.integers(1, 2**40).map(lambda n: {"max_steps": n})
    | st.floats(0.01, 100).map(lambda n: {"num_epochs": n}),
    st.fixed_dictionaries(
        {},
        optional={
            "learning_rate": numbers,
            "betas": st.lists(st.floats(0, 0.999), min_size=2, max_size=2),
            "max_grad_norm": st.none() | st.floats(1e-9, 10),
            "threads": st.just("auto") | st.integers(1, 64),
        },
    ),
    st.sampled_from(["auto", "keep"]) | st.just({"keep_layers": 2, "offload": True}),
    st.sampled_from(["constant", "linear", "cosine"]),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(configs)
def test_a_dumped_config_loads_back_to_an_equal_one(
    tmp_path: Path, values: dict[str, object]
) -> None:
    config = TrainConfig.model_validate(values)
    path = tmp_path / "dumped.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    assert load_config(path).config == config


def test_a_loaded_config_is_the_same_after_a_dump_in_another_folder(
    load: Load, tmp_path: Path
) -> None:
    config = load("optimizer: {learning_rate: 1e-5}\n").config
    other = tmp_path / "elsewhere.d"
    other.mkdir()
    (other / "config.yaml").write_text(dump_config(config))
    assert load_config(other / "config.yaml").config == config


def test_a_template_is_a_name_or_a_file_beside_the_config(load: Load, tmp_path: Path) -> None:
    assert load("", "data.template=chatml").config.data.template == "chatml"
    assert load("", "data.template=own.jinja").config.data.template == f"{tmp_path}/own.jinja"
    assert load("").config.data.template is None


@pytest.mark.parametrize("value", ["chat", "own.txt", "''", "[a]"])
def test_what_is_neither_is_refused(problems: Problems, value: str) -> None:
    [problem] = problems("", f"data.template={value}")
    assert "data.template: wanted a path that ends in .jinja, or one of alpaca, chatml" in problem


def test_a_folder_an_entry_and_an_id_are_data_too(load: Load, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "corpus").mkdir()
    (tmp_path / "dataset_info.json").write_text("{}")
    train = "data.train=[corpus, dataset_info.json#it, owner/name, owner/name.json, info.json#it]"
    loaded = load("", train)
    assert [source.path for source in loaded.config.data.train] == [
        tmp_path / "corpus",
        tmp_path / "dataset_info.json#it",
        Path("owner/name"),
        tmp_path / "owner/name.json",
        tmp_path / "info.json#it",
    ]
    found = missing(load, train)
    assert len(found) == 2
    assert "data.train[3]: there is no file `owner/name.json`" in found[0]
    assert "data.train[4]: there is no file `info.json#it`" in found[1]


def test_a_path_that_is_there_is_never_an_id(load: Load, tmp_path: Path) -> None:
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "name").write_text("")
    [source] = load("", "data.train=owner/name").config.data.train
    assert source.path == tmp_path / "owner" / "name"


@pytest.mark.parametrize(
    "columns",
    ["{}", "[text]", "{txt: a}", "{text: ''}", "{text: 5}", "{instruction: a, output: a}"],
)
def test_names_of_columns_are_checked(problems: Problems, columns: str) -> None:
    for key in ("columns", "tags"):
        [problem] = problems("", f"data.train=[{{path: a, {key}: {columns}}}]")
        assert f"data.train[0].{key}: wanted a mapping of " in problem


def test_the_cache_folder_need_not_be_there_and_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "train.jsonl").touch()
    (tmp_path / "there").mkdir()
    path = tmp_path / "config.yaml"
    path.write_text(
        "model: {path: model}\ndata: {train: train.jsonl}\ntrain: {output_dir: run, max_steps: 1}\n"
    )
    for folder in ("there", "to/be/made"):
        check_paths(load_config(path, [f"data.cache_dir={folder}"]))
    with pytest.raises(ConfigError, match=r"`train\.jsonl` .* is a file; name a folder"):
        check_paths(load_config(path, ["data.cache_dir=train.jsonl"]))


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_what_is_no_file_is_refused_by_name_in_every_key(
    kind: str, load: Load, tmp_path: Path
) -> None:
    """Reading it might never end."""
    make_other(kind, tmp_path / "odd.jinja")
    make_other(kind, tmp_path / "odd.json")
    wanted = dict.fromkeys(PATH_KEYS, "odd.jinja") | {"data.eval": "odd.json#name"}
    found = missing(load, *(f"{key}={name}" for key, name in wanted.items()))
    assert [line.split(": ")[1].partition("[")[0] for line in found] == list(PATH_KEYS)
    for line in found:
        assert line.endswith(f"is a {kind}, where a file or a folder belongs")


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("name", ["config.json", "additional_chat_templates/more.jinja"])
def test_what_is_no_file_is_refused_among_those_of_a_model(
    name: str, kind: str, load: Load, tmp_path: Path
) -> None:
    place = tmp_path / "tiny" / name
    place.parent.mkdir(parents=True)
    make_other(kind, place)
    (tmp_path / "tiny" / "nowhere").symlink_to("none")
    (problem,) = [line for line in missing(load, "model.path=tiny") if "model.path" in line]
    assert f"holds {name}, a {kind}, which no model has; move it away" in problem


@pytest.mark.parametrize("key", ["data.train", "data.eval"])
def test_a_pipe_without_a_name_is_called_one(load: Load, key: str) -> None:
    """What `<(...)` and `cat rows |` give: /proc links it to no place."""
    reading, writing = os.pipe()
    try:
        problems = missing(load, f"{key}=/dev/fd/{reading}")
    finally:
        os.close(reading)
        os.close(writing)
    said = f"{key}: `/dev/fd/{reading}` is a pipe, where a file or a folder belongs"
    assert [problem for problem in problems if key in problem] == [
        f"override `{key}=/dev/fd/{reading}`: {said}"
    ]
