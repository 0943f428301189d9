"""Settings of tests that compute."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """On tensors this small, torch's threads wait for each other far longer than they work."""
    torch.set_num_threads(1)
