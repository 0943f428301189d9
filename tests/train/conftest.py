"""What tests of whole runs share."""

import signal
from collections.abc import Iterator

import pytest

from tests.train.prepared import Prepared, prepared


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prepared]:
    """Forks runs."""
    with prepared(tmp_path_factory.mktemp("prepared")) as found:
        yield found


@pytest.fixture
def heeds_hangup() -> Iterator[None]:
    """A suite that was started with `nohup` ignores SIGHUP, as a run of its own would."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
