"""The whole engine on the threads of `CudaLanes`, with a device that is done when it is told."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatrain_cli.pipeline import cuda_lanes
from megatrain_cli.pipeline.cuda_lanes import CudaLanes
from tests.engine import Outcome
from tests.pipeline import fake_cuda
from tests.pipeline.modes import MODES, train


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("name", MODES)
def test_threads_compute_what_lanes_without_concurrency_compute(
    name: str,
    later: bool,
    configs: dict[str, Path],
    plain: dict[str, Outcome],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_lanes, "cuda", fake_cuda)
    with ThreadPoolExecutor(3) as pool:
        outcome = train(configs, name, CudaLanes, later=pool.submit if later else None)
    assert outcome.same_bits(plain[name])
    assert not [t for t in threading.enumerate() if t.name.endswith("-lane")]
