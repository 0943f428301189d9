"""Attention on the GPU: packed rows agree with the CPU, and a deterministic run repeats."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config

from megatrain_cli.errors import DeviceError
from megatrain_cli.model.attention import PackedRows, packed_attention
from megatrain_cli.model.discover import make_skeleton
from megatrain_cli.model.kernels import dispatched_kernel, run_layers_once, settle_repeatable
from megatrain_cli.model.recorder import LayerArgs
from megatrain_cli.model.skeleton import Skeleton
from megatrain_cli.model.template import LayerTemplate, Prologue
from megatrain_cli.pipeline.cuda_lanes import CudaLanes
from megatrain_cli.pipeline.lanes import InlineLanes
from tests.engine import run, write_config
from tests.families import KINDS, tiny_config
from tests.gpu.test_lanes import CUDA, SMALL, waiting_is_an_error
from tests.model.streamed import pack
from tests.torch_settings import settings_put_back

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def _settings_are_put_back() -> Iterator[None]:
    with settings_put_back():
        yield


def number(*lengths: tuple[int, ...]) -> NDArray[np.int32]:
    return np.array([np.repeat(np.arange(len(row)), row) for row in lengths], dtype=np.int32)


def on_gpu(documents: NDArray[np.int32]) -> PackedRows:
    packed = pack(documents)
    assert packed is not None
    return PackedRows(packed.position_ids.to(GPU), packed.starts.to(GPU))


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("width", [64, 128])
def test_packed_attention_agrees_with_the_documents_one_by_one_in_fp32(
    window: int | None, width: int
) -> None:
    """BF16 has 8 bits: 2^-6 of the largest element, forward and backward."""
    documents = number((100, 1, 155), (256,))
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(2, heads, 256, width, generator=generator) for heads in (8, 2, 2, 8)]
    module = torch.nn.Module()
    module.num_key_value_groups = 4  # type: ignore[assignment]  # as attention modules have it

    def apply(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        *heads, above = (x.to(torch.bfloat16).to(device, dtype) for x in drawn)
        query, key, value = (x.requires_grad_() for x in heads)
        packed = pack(documents)
        assert packed is not None
        starts = packed.starts.to(device)
        out, _ = packed_attention(
            module, query, key, value, None, 0.0, None, window, document_starts=starts
        )
        above = above.transpose(1, 2).contiguous()
        return [out, *torch.autograd.grad(out, (query, key, value), above)]

    for found, expected in zip(
        apply(GPU, torch.bfloat16), apply(torch.device("cpu"), torch.float32), strict=True
    ):
        assert (found.cpu().float() - expected).abs().max() <= 2**-6 * expected.abs().max()


def layouts() -> list[NDArray[np.int32]]:
    """Of three steps, each with another number of documents of other lengths."""
    return [
        number((64,), (30, 34)),
        number((1, 20, 40, 3), (10, 10, 10, 10, 24)),
        number((60, 4), (1,) * 64),
    ]


def test_a_packed_run_agrees_with_the_cpu(tmp_path: Path) -> None:
    def outcome(device: str, make_lanes: Callable[[torch.device], Any]) -> Any:
        config = write_config(tmp_path / device, SMALL, {"pipeline": {"device": device}})
        decided = {"micro_batch_size": 2, "num_micro_batches": 1}
        return run(config, make_lanes, steps=1, decided=decided, documents=layouts()[1:])

    gpu = outcome("cuda", CudaLanes)
    cpu = outcome("cpu", lambda device: InlineLanes())
    assert abs(gpu.losses[0] - cpu.losses[0]) < 2e-3
    for a, b in zip(gpu.gradients, cpu.gradients, strict=True):
        assert (a.float() - b.float()).abs().max() <= 2**-6 * b.float().abs().max()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_packed_step_is_issued_without_waiting_for_the_device(tmp_path: Path) -> None:
    config = write_config(tmp_path, SMALL, {"pipeline": CUDA})
    run(config, CudaLanes, around=waiting_is_an_error(), documents=layouts())


def small_skeleton(kind: str, attention: str) -> Skeleton:
    config = tiny_config(
        kind, tied=True, hidden=128, **({"head_dim": 32} if kind == "qwen3" else {})
    )
    skeleton = make_skeleton(config, dtype=torch.bfloat16, attention=attention)
    skeleton.move_buffers(GPU)
    return skeleton


@pytest.mark.parametrize("kind", KINDS)
def test_other_documents_never_compile_a_layer_again(kind: str) -> None:
    torch.compiler.reset()
    skeleton = small_skeleton(kind, "packed")
    counter = CompileCounterWithBackend("inductor")

    def call(template: LayerTemplate, leaves: list[Tensor], x: Tensor, args: LayerArgs) -> Tensor:
        return template(leaves, x, args)

    compiled = torch.compile(call, backend=counter, dynamic=False)
    generator = torch.Generator(GPU).manual_seed(0)

    def draw(numel: int) -> Tensor:
        return torch.randn(numel, generator=generator, dtype=torch.bfloat16, device=GPU) * 0.1

    runs = [draw(layout.numel) for layout in skeleton.layouts]
    prologue = Prologue(skeleton)
    for documents in layouts():
        ids = torch.randint(0, 256, documents.shape, generator=generator, device=GPU)
        hidden, args = prologue(prologue.leaves(runs[0]), ids, on_gpu(documents))
        for index, call_args in enumerate(args):
            template = LayerTemplate(skeleton, index)
            leaves = template.leaves(runs[index + 1])
            hidden = hidden.detach().requires_grad_()
            above = draw(hidden.numel()).view_as(hidden)
            plain, output = (f(template, leaves, hidden, call_args) for f in (call, compiled))
            expected = torch.autograd.grad(plain, (hidden, *leaves), above)
            found = torch.autograd.grad(output, (hidden, *leaves), above)
            for a, b in zip((output, *found), (plain, *expected), strict=True):
                assert (a - b).abs().max() <= 2**-4 * b.abs().max()
            hidden = output
    assert counter.frame_count == 1


BENCH: Mapping[str, Any] = {
    **SMALL,
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 2048,
}


def trial(attention: str, rows: int = 4, length: int = 1024) -> Callable[[], dict[str, Tensor]]:
    config = Qwen2Config.from_dict({**BENCH, "max_position_embeddings": length})
    skeleton = make_skeleton(config, dtype=torch.bfloat16, attention=attention)
    skeleton.move_buffers(GPU)
    return partial(run_layers_once, skeleton, rows, length, GPU)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_deterministic_run_repeats_bit_for_bit(attention: str, tmp_path: Path) -> None:
    settle_repeatable(attention, trial(attention))
    section = {"attention": attention, "path": "model", "init": "random"}
    config = write_config(tmp_path, SMALL, {"pipeline": CUDA, "model": section})
    first = run(config, CudaLanes)
    assert all(run(config, CudaLanes).same_bits(first) for _ in range(3))


def test_a_packed_run_repeats_or_is_refused(tmp_path: Path) -> None:
    try:
        settle_repeatable("packed", trial("packed"))
    except DeviceError as refused:
        assert "variable-length flash gave another" in str(refused)  # noqa: PT017  either may be
        return
    config = write_config(tmp_path, SMALL, {"pipeline": CUDA})
    first = run(config, CudaLanes, documents=layouts())
    assert all(run(config, CudaLanes, documents=layouts()).same_bits(first) for _ in range(3))


class Kernels(TorchDispatchMode):
    """Names of the attention operators that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self.names: list[str] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if "attention" in str(func):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


OPERATORS = {
    "cuDNN": "cudnn",
    "flash": "flash",
    "memory-efficient": "efficient",
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_named_kernel_is_the_one_that_runs(dtype: torch.dtype) -> None:
    config = Qwen2Config.from_dict({**BENCH, "max_position_embeddings": 1024})
    named = dispatched_kernel(config, dtype, GPU, 4, 1024)
    query, key = (
        torch.randn(4, heads, 1024, 128, dtype=dtype, device=GPU, requires_grad=True)
        for heads in (8, 2)
    )
    with Kernels() as ran:
        F.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)
    operator = OPERATORS.get(named, "math")
    # The unfused one is no operator of its own under autograd.
    assert [operator in name for name in ran.names] == [True] * (named in OPERATORS)
