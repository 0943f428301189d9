"""`resume --force` tells what it was needed for, and where it was not."""

from pathlib import Path

import pytest

from megatrain_cli.checkpoint.load import LoadReport
from megatrain_cli.train.loaded import notes_on_loaded
from tests.train.live import resume_here, train_here
from tests.train.workspace import make_workspace


@pytest.fixture
def run(tmp_path: Path) -> Path:
    train_here(make_workspace(tmp_path, train={"max_steps": 1}, model={"layers": 2}))
    return tmp_path / "run"


def test_a_force_that_nothing_needed_is_said(run: Path) -> None:
    said = resume_here(run, steps=2, force=True)
    assert "--force: has no effect: all weights are finite\n" in said
    assert "--force" not in resume_here(run, steps=3)


def test_what_was_forced_is_named() -> None:
    one, two = (LoadReport(4096, 1.0, names) for names in (("head",), ("head", "norm.weight")))
    assert notes_on_loaded(two, force=True) == [
        "loaded 4.00 KiB in 1.0 s, 4.00 KiB/s; every byte was verified",
        "--force: values that are not finite are in weights of 2 layers, as in head",
    ]
    assert notes_on_loaded(one, force=True)[1].endswith("of 1 layer, as in head")
