"""An evaluation between steps computes the same whatever runs its ops, and changes no step."""

import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from hypothesis import settings

from megatrain_cli.errors import MegatrainError
from megatrain_cli.pipeline import cuda_lanes
from megatrain_cli.pipeline.cuda_lanes import CudaLanes
from megatrain_cli.pipeline.ops import Lane
from tests.engine import Later, Outcome, inline
from tests.pipeline import fake_cuda
from tests.pipeline.adversary import Lazy, any_order
from tests.pipeline.modes import MODES, train
from tests.pipeline.test_adversary import adversarial, forget

PASSES = 2


@pytest.fixture(scope="session")
def scored(configs: dict[str, Path]) -> dict[str, Outcome]:
    return {name: train(configs, name, inline, passes=PASSES) for name in MODES}


@pytest.mark.parametrize("name", MODES)
def test_it_changes_no_bit_of_training(
    name: str, plain: dict[str, Outcome], scored: dict[str, Outcome]
) -> None:
    assert scored[name].same_bits(plain[name])
    scores = scored[name].scores
    assert len(set(scores)) == 3 * PASSES
    assert all(math.isfinite(score) for score in scores)


@pytest.mark.parametrize("name", MODES)
def test_threads_compute_what_lanes_without_concurrency_compute(
    name: str,
    configs: dict[str, Path],
    scored: dict[str, Outcome],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_lanes, "cuda", fake_cuda)
    with ThreadPoolExecutor(3) as pool:
        found = train(configs, name, CudaLanes, later=pool.submit, passes=PASSES)
    assert found.same_bits(scored[name])
    assert found.scores == scored[name].scores


@pytest.mark.parametrize("name", MODES)
@settings(max_examples=3)
@any_order
def test_every_order_the_waits_allow_computes_the_same_bits(
    name: str,
    configs: dict[str, Path],
    scored: dict[str, Outcome],
    seed: int,
    favour: Lane | None,
    later: Later | None,
) -> None:
    found = train(configs, name, partial(adversarial, seed, favour), later=later, passes=PASSES)
    assert found.same_bits(scored[name])
    assert found.scores == scored[name].scores


@pytest.mark.parametrize(
    ("event", "name"),
    [
        ("updated", "direct"),
        ("updated", "eager"),
        ("weights_ready", "direct"),
        ("buffer_free", "one slot"),
        ("totals_ready", "direct"),
    ],
)
def test_without_a_wait_some_order_computes_something_else(
    event: str, name: str, configs: dict[str, Path], scored: dict[str, Outcome]
) -> None:
    def goes_wrong(seed: int, favour: Lane | None) -> bool:
        lanes = partial(adversarial, seed, favour)
        try:
            found = train(
                configs, name, lanes, later=Lazy, passes=PASSES, scoring=partial(forget, event)
            )
        except MegatrainError:
            return True
        return found.scores != scored[name].scores

    assert any(goes_wrong(seed, favour) for seed in range(10) for favour in (None, *Lane))
