"""Fixtures of the tests that run the whole engine."""

from pathlib import Path

import pytest

from tests.engine import Outcome, inline
from tests.pipeline.modes import MODES, train, write_configs


@pytest.fixture(scope="session")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_configs(tmp_path_factory.mktemp("modes"))


@pytest.fixture(scope="session")
def plain(configs: dict[str, Path]) -> dict[str, Outcome]:
    return {name: train(configs, name, inline) for name in MODES}
