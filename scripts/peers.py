"""What a user would train with instead: each peer as a function that makes one optimizer step.

All of them train Hugging Face's own model: BF16 compute, `sdpa`, activation checkpointing of every
decoder layer, AdamW, gradients clipped to 1.0. They differ in what is kept where.
"""

import os
import socket
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scripts.shapes import Shape, write_model

Step = Callable[[Tensor], Tensor]
"""Takes token ids `(B, T)` on the device, trains on all of them, gives their loss."""

RATE, MAX_NORM = 1e-5, 1.0


def resident(shape: Shape, device: torch.device) -> Step:
    """All on the GPU in BF16, moments too, and no FP32 copy: small updates are lost in rounding."""
    model = _checkpointed(_build(shape, torch.bfloat16, device))
    return _torch_step(model, nullcontext)


def resident_fp32(shape: Shape, device: torch.device) -> Step:
    """All on the GPU in FP32, computing under BF16 autocast: 16 bytes a parameter."""
    model = _checkpointed(_build(shape, torch.float32, device))
    return _torch_step(model, lambda: torch.autocast(device.type, torch.bfloat16))


def fsdp2(shape: Shape, device: torch.device) -> Step:
    """`fully_shard` a layer, with FP32 parameters, gradients and moments on the CPU."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    _join_group_of_one(device)
    model: Any = _build(shape, torch.float32, device)
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda"),
    }
    layers = model.model.layers
    for index, layer in enumerate(layers):
        # Outside of FSDP's hooks, or recompute would gather a layer a second time.
        layers[index] = fully_shard(checkpoint_wrapper(layer), **options)
    return _torch_step(fully_shard(model, **options), nullcontext)


def deepspeed(shape: Shape, device: torch.device) -> Step:
    """ZeRO-3 with parameters and optimizer on the CPU, page-locked; sizes as DeepSpeed sets them.

    Its CPU optimizer is compiled at the first use on a machine.
    """
    import deepspeed as ds
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    _join_group_of_one(device)
    # Reentrant, as DeepSpeed's parameters have another shape while they are not gathered.
    model = _checkpointed(_build(shape, torch.bfloat16, device), use_reentrant=True)
    on_cpu = {"device": "cpu", "pin_memory": device.type == "cuda"}
    engine, *_ = ds.initialize(
        model=model,
        optimizer=DeepSpeedCPUAdam(model.parameters(), lr=RATE, adamw_mode=True),
        config={
            "train_micro_batch_size_per_gpu": 1,  # counts samples for its log, and nothing else
            "gradient_clipping": MAX_NORM,
            "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": 3,
                "offload_param": on_cpu,
                "offload_optimizer": on_cpu,
                "overlap_comm": True,
            },
        },
    )

    def step(tokens: Tensor) -> Tensor:
        loss: Tensor = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


PEERS: dict[str, Callable[[Shape, torch.device], Step]] = {
    "resident": resident,
    "resident-fp32": resident_fp32,
    "fsdp2": fsdp2,
    "deepspeed": deepspeed,
}


def _build(shape: Shape, dtype: torch.dtype, device: torch.device) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), shape)
        config = AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    with device:  # random weights are drawn where they are: on a GPU at once
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    trained: nn.Module = model.train()
    return trained


def _checkpointed(model: nn.Module, *, use_reentrant: bool = False) -> nn.Module:
    enable: Callable[..., None] = model.gradient_checkpointing_enable  # type: ignore[assignment]  # of Hugging Face's models
    enable({"use_reentrant": use_reentrant})
    return model


def _torch_step(model: nn.Module, precision: Callable[[], AbstractContextManager[object]]) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, fused=True)

    def step(tokens: Tensor) -> Tensor:
        with precision():
            loss: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _join_group_of_one(device: torch.device) -> None:
    """A process group of this process alone, as `torchrun --nproc-per-node 1` would make it."""
    # DeepSpeed reads these; without all five it looks for MPI.
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": socket.gethostname(), "MASTER_PORT": "29500"}
    meeting = Path(tempfile.mkdtemp(prefix="megatrain-bench-")) / "group"
    torch.distributed.init_process_group(
        # Gradients that lie on the CPU are reduced by gloo, for their norm.
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        init_method=meeting.as_uri(),
        rank=0,
        world_size=1,
    )
