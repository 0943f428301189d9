"""A device that has failed says so wherever it is asked next; what is on the host is saved."""

from pathlib import Path

import pytest
import torch

from megatrain_cli.errors import DeviceError, InternalError
from megatrain_cli.pipeline.lanes import InlineLanes
from megatrain_cli.pipeline.ops import Kind
from tests.train.here import train_here
from tests.train.test_failures import run_with
from tests.train.test_run import checkpoints_of
from tests.train.workspace import make_workspace


@pytest.mark.parametrize("call", ["mark", "fence", "take_spans"])
def test_a_device_that_fails_outside_of_any_op_is_told_from_a_bug_and_its_steps_are_saved(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F61: a failure shows at whatever call comes next, as one that waits for an event."""
    ask, asked = getattr(InlineLanes, call), 0
    calls_a_step = {"mark": 3, "fence": 2, "take_spans": 1}[call]

    def fail(self: InlineLanes) -> object:
        nonlocal asked
        asked += 1
        if asked > 2 * calls_a_step:
            raise torch.AcceleratorError("CUDA error: unspecified launch failure\nmore")
        return ask(self)

    monkeypatch.setattr(InlineLanes, call, fail)
    done = r"The device failed \(CUDA error: unspecified launch failure\)\..* is saved\.$"
    with pytest.raises(DeviceError, match=done):
        train_here(make_workspace(tmp_path))
    [name] = checkpoints_of(tmp_path / "run")
    assert name in ("step-00000002", "step-00000003")


@pytest.mark.parametrize(
    "said",
    [
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`",
        "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
        "Triton Error [CUDA]: device-side assert triggered",
    ],
)
def test_a_library_that_meets_the_failed_device_first_is_no_bug_either(
    said: str, tmp_path: Path
) -> None:
    """They say what they met in words alone; which call meets it first is a matter of time."""
    with pytest.raises(DeviceError) as caught:
        run_with(make_workspace(tmp_path), Kind.LOSS, RuntimeError(f"{said}\nmore"))
    assert f"failed in loss of head, micro-batch 0 ({said})." in str(caught.value)


def test_words_in_the_middle_of_another_error_make_no_device_of_it(tmp_path: Path) -> None:
    error = RuntimeError("a value: CUDA error")
    with pytest.raises(InternalError, match="a value: CUDA error"):
        run_with(make_workspace(tmp_path), Kind.LOSS, error)
