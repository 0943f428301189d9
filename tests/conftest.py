"""Profiles and environment that hold for every test."""

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from hypothesis import settings

settings.register_profile("ci", max_examples=100, derandomize=True, deadline=None)
settings.register_profile("dev", max_examples=50, deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


@pytest.fixture(autouse=True)
def _own_config_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `megatrain probe` stored for this machine must not change what tests see."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config-home"))


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Bytes are no name: compressors write the time into them, and all workers must agree."""
    return argname if isinstance(val, bytes) else None
