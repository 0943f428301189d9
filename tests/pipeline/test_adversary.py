"""Any order that the waits allow computes the same bits; without a wait, some order does not.

The whole engine on the CPU, deferred updates of one step running into the next, under lanes whose
interleaving a seed decides.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain_cli.errors import MegatrainError
from megatrain_cli.pipeline.lanes import InlineLanes, Lanes
from megatrain_cli.pipeline.ops import Lane, Op
from tests.engine import Outcome, Settings, run, write_config
from tests.pipeline.adversary import AdversarialLanes

SHAPE: Settings = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
DIRECT: Mapping[str, object] = {"num_slabs": 0}
MODES: dict[str, tuple[Mapping[str, Settings], Mapping[str, object]]] = {
    "direct": ({}, DIRECT),
    "one slot": ({"pipeline": {"staging_buffers": 1}}, DIRECT),
    "two slabs": ({"pipeline": {"grad_slabs": 2}}, {}),
    "pieces": ({"pipeline": {"grad_slabs": 2}}, {"slab_numel": 512}),
    "kept": ({"pipeline": {"activations": {"keep_layers": 2}, "staging_buffers": 3}}, DIRECT),
    "offloaded": ({"pipeline": {"activations": {"keep_layers": 0, "offload": True}}}, DIRECT),
    "offloaded, many slots": (
        {"pipeline": {"activations": {"keep_layers": 0, "offload": True}, "staging_buffers": 5}},
        DIRECT,
    ),
    "eager": ({"optimizer": {"update": "eager", "max_grad_norm": None}}, {"slab_numel": 512}),
}


def inline(device: torch.device) -> InlineLanes:
    del device
    return InlineLanes()


def adversarial(seed: int, favour: Lane | None, device: torch.device) -> AdversarialLanes:
    del device
    return AdversarialLanes(seed, favour)


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, (sections, _) in MODES.items():
        pipeline = {"device": "cpu", **sections.get("pipeline", {})}
        shape = {**SHAPE, "tie_word_embeddings": name in ("direct", "pieces", "eager")}
        train = {"micro_batch_size": 1, "gradient_accumulation_steps": 2, "max_steps": 3}
        folder = tmp_path_factory.mktemp(name.replace(" ", "-").replace(",", ""))
        made[name] = write_config(
            folder,
            shape,
            {**sections, "train": {"output_dir": "run", **train}, "pipeline": pipeline},
        )
    return made


@pytest.fixture(scope="module")
def plain(configs: dict[str, Path]) -> dict[str, Outcome]:
    return {name: train(configs, name, inline) for name in MODES}


def train(
    configs: dict[str, Path],
    name: str,
    lanes: Callable[[torch.device], Lanes],
    ops: Callable[[tuple[Op, ...]], tuple[Op, ...]] | None = None,
) -> Outcome:
    return run(configs[name], lanes, length=6, poison=True, decided=MODES[name][1], ops=ops)


@pytest.mark.parametrize("name", MODES)
@settings(max_examples=20)
@given(seed=st.integers(0, 2**32), favour=st.sampled_from([None, *Lane]))
def test_every_order_the_waits_allow_computes_the_same_bits(
    name: str,
    configs: dict[str, Path],
    plain: dict[str, Outcome],
    seed: int,
    favour: Lane | None,
) -> None:
    assert train(configs, name, partial(adversarial, seed, favour)).same_bits(plain[name])


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
            outcome = train(configs, name, lanes, partial(forget, event))
        except (MegatrainError, RuntimeError, KeyError):
            return True  # a tripwire, or memory that was never written
        return not outcome.same_bits(plain[name])

    assert any(goes_wrong(favour, seed) for seed in range(3) for favour in [*Lane, None])
