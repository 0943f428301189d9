"""What tests of whole runs share."""

from collections.abc import Iterator

import pytest

from tests.train.prepared import Prepared, prepared


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prepared]:
    """Forks runs."""
    with prepared(tmp_path_factory.mktemp("prepared")) as found:
        yield found
