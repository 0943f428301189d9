"""A config file from text, and the problems in it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megatrain_cli.config.load import LoadedConfig, load_config
from megatrain_cli.errors import ConfigError

Load = Callable[..., LoadedConfig]
Problems = Callable[..., list[str]]

MINIMAL = """\
model: {path: model}
data: {train: train.jsonl}
train: {output_dir: run, max_steps: 4}
"""


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Write a text to `config.yaml` (after three lines of required keys) and load it."""

    def load(text: str = "", *overrides: str, start: str = MINIMAL) -> LoadedConfig:
        path = tmp_path / "config.yaml"
        path.write_text(start + text)
        return load_config(path, overrides)

    return load


@pytest.fixture
def problems(load: Load, tmp_path: Path) -> Problems:
    """Load what must be refused; the problems, with `config.yaml` for the file's path."""

    def problems(text: str = "", *overrides: str, start: str = MINIMAL) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            load(text, *overrides, start=start)
        return [problem.replace(f"{tmp_path}/", "") for problem in caught.value.problems]

    return problems
