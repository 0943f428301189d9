"""Any order that the waits allow computes the same bits; without a wait, some order does not.

The whole engine on the CPU, deferred updates of one step running into the next, under lanes whose
interleaving a seed decides.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from megatrain_cli.errors import MegatrainError
from megatrain_cli.pipeline.ops import Lane, Op
from tests.engine import Later, Outcome
from tests.pipeline.adversary import AdversarialLanes, Lazy, any_order
from tests.pipeline.modes import MODES, train


def adversarial(seed: int, favour: Lane | None, device: torch.device) -> AdversarialLanes:
    del device
    return AdversarialLanes(seed, favour)


@pytest.mark.parametrize("name", MODES)
@settings(max_examples=20)
@any_order
def test_every_order_the_waits_allow_computes_the_same_bits(
    name: str,
    configs: dict[str, Path],
    plain: dict[str, Outcome],
    seed: int,
    favour: Lane | None,
    later: Later | None,
) -> None:
    lanes = partial(adversarial, seed, favour)
    assert train(configs, name, lanes, later=later).same_bits(plain[name])


def forget(event: str, ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """The schedule without any wait for one kind of event."""
    assert any(wait.name == event for op in ops for wait in op.waits)
    return tuple(replace(op, waits=tuple(w for w in op.waits if w.name != event)) for op in ops)


@pytest.mark.parametrize(
    ("event", "name"),
    [
        ("weights_ready", "direct"),
        ("buffer_free", "direct"),
        ("backward_done", "direct"),
        ("grads_out", "direct"),
        ("updated", "direct"),
        ("totals_ready", "direct"),
        ("clipped", "direct"),
        ("slab_free", "two slabs"),
        ("slab_free", "eager"),
        ("grads_out", "pieces"),
        ("input_ready", "offloaded"),
        ("input_offloaded", "offloaded"),
        ("input_fetched", "offloaded"),
        ("input_free", "offloaded, many slots"),
    ],
)
def test_without_an_event_some_order_goes_wrong(
    event: str, name: str, configs: dict[str, Path], plain: dict[str, Outcome]
) -> None:
    def goes_wrong(favour: Lane | None, seed: int) -> bool:
        lanes = partial(adversarial, seed, favour)
        try:
            outcome = train(configs, name, lanes, partial(forget, event), later=Lazy)
        except (MegatrainError, RuntimeError, KeyError):
            return True  # a tripwire, or memory that was never written
        return not outcome.same_bits(plain[name])

    assert any(goes_wrong(favour, seed) for seed in range(3) for favour in [*Lane, None])
