"""A process's first backward may be a product: nothing is missing in autograd's thread."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

# All memory of the backward is at hand, as an allocation would make the context current.
SCRIPT = """
import warnings
import torch
from megatrain_cli.model.backward import wake_backward

device = torch.device("cuda:0")
x, w, above = (torch.randn(1024, 1024, device=device) for _ in range(3))
x.requires_grad_()
room = [torch.empty(1024, 1024, device=device) for _ in range(4)]
del room
wake_backward(device)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    (x @ w).backward(above)
assert not caught, [str(warning.message) for warning in caught]
assert torch.allclose(x.grad, above @ w.T, rtol=1e-3, atol=1e-3)
"""


def test_a_process_may_begin_with_the_backward_of_a_product() -> None:
    """In a process of its own: autograd's thread is woken once."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
