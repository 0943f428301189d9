"""A deterministic run gets kernels that were seen to repeat, or none at all."""

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatrain_cli.errors import DeviceError
from megatrain_cli.model.discover import make_skeleton
from megatrain_cli.model.kernels import (
    TRIALS,
    dispatched_kernel,
    run_layers_once,
    settle_repeatable,
)
from tests.families import KINDS, WINDOW, tiny_config
from tests.torch_settings import enabled_backends, settings_put_back

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _settings_are_put_back() -> Iterator[None]:
    with settings_put_back():
        yield


def layers(kind: str, attention: str = "sdpa") -> Callable[[], Mapping[str, Tensor]]:
    skeleton = make_skeleton(tiny_config(kind, tied=True), dtype=torch.float32, attention=attention)
    return partial(run_layers_once, skeleton, 2, 2 * WINDOW, CPU)


def test_a_kernel_that_repeats_is_taken_and_the_others_are_off() -> None:
    calls = []

    def trial() -> dict[str, Tensor]:
        calls.append(enabled_backends())
        return {"output": torch.tensor([0.0, float("nan")])}

    assert settle_repeatable("sdpa", trial) == "cuDNN"
    assert calls == [(True, False, False, False)] * TRIALS
    assert enabled_backends() == (True, False, False, False)
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]  # torch sets it late
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.mark.parametrize("missing", ["No available kernel. Aborting execution.", None])
def test_where_the_first_is_missing_or_differs_the_second_is_taken(missing: str | None) -> None:
    count = 0

    def trial() -> dict[str, Tensor]:
        nonlocal count
        if torch.backends.cuda.cudnn_sdp_enabled():
            if missing is not None:
                raise RuntimeError(missing)
            count += 1
        return {"output": torch.tensor(float(count))}

    assert settle_repeatable("sdpa", trial) == "memory-efficient"
    assert enabled_backends() == (False, False, True, False)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()


@pytest.mark.parametrize(
    ("attention", "names", "remedy"),
    [
        ("sdpa", ("cuDNN", "memory-efficient"), "Set `model.attention: eager`"),
        ("packed", ("variable-length flash",), "Set `data.packing: false`"),
        ("eager", ("eager",), "Set `train.deterministic: false`"),
    ],
)
def test_a_bit_that_differs_ends_the_run_before_it_begins(
    attention: str, names: tuple[str, ...], remedy: str
) -> None:
    count = 0

    def trial() -> dict[str, Tensor]:
        nonlocal count
        count += 1
        # 0 and -0 are equal, and yet not the same bits.
        return {"output": torch.tensor(-0.0 if count % TRIALS == 0 else 0.0)}

    with pytest.raises(DeviceError) as refused:
        settle_repeatable(attention, trial)
    for name in names:
        assert f"{name} gave another output the next time" in str(refused.value)
    assert remedy in str(refused.value)


def test_another_failure_is_not_taken_for_a_missing_kernel() -> None:
    def trial() -> dict[str, Tensor]:
        raise RuntimeError("the device is on fire")

    with pytest.raises(RuntimeError, match="on fire"):
        settle_repeatable("sdpa", trial)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attention", ["eager", "packed"])
def test_the_models_own_layers_are_tried_and_repeat_on_the_cpu(kind: str, attention: str) -> None:
    trial = layers(kind, attention)
    assert len(settle_repeatable(attention, trial)) > 0
    results = trial()
    embed = 2 if kind == "gpt2" else 1
    layer = [name for name in results if "layer-00000" in name]
    # The output, its input's gradient and that of each parameter.
    assert len(layer) == 2 + len(_parameters(kind))
    assert len([name for name in results if name.endswith("of embed")]) == embed
    assert all(tensor.any() for tensor in results.values())


def _parameters(kind: str) -> tuple[object, ...]:
    skeleton = make_skeleton(tiny_config(kind, tied=True), dtype=torch.float32, attention="sdpa")
    return skeleton.spec.decoder_layers[0].params


def test_attention_that_does_not_repeat_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = layers("llama", "packed")
    exact = F.scaled_dot_product_attention
    noise = torch.Generator().manual_seed(0)

    def sloppy(*args: Tensor, **options: object) -> Tensor:
        output: Tensor = exact(*args, **options)  # type: ignore[arg-type]  # as transformers gives them
        return output + 1e-6 * torch.randn(output.shape, generator=noise)

    monkeypatch.setattr(F, "scaled_dot_product_attention", sloppy)
    with pytest.raises(
        DeviceError, match="variable-length flash gave another output of layer-00000"
    ):
        settle_repeatable("packed", trial)


def test_the_named_kernel_is_the_dispatchers_choice() -> None:
    for kind in KINDS:
        config = tiny_config(kind, tied=True)
        for length in (WINDOW, 2 * WINDOW):
            assert dispatched_kernel(config, torch.float32, CPU, 2, length) == "flash"
            with sdpa_kernel(SDPBackend.MATH):
                assert dispatched_kernel(config, torch.float32, CPU, 2, length) == "unfused"
