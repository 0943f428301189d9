"""Which attention kernel runs on a GPU, and how a run gets one that repeats bit for bit.

Torch's settings are the process's: `settle_repeatable` changes them for good. Compiled layers take
them in when they are traced, so it comes before any compilation.
"""

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from transformers import PreTrainedConfig

from megatrain_cli.errors import DeviceError
from megatrain_cli.model.attention import PACKED, halved_rows
from megatrain_cli.model.functions import LayerFunction, run_layer
from megatrain_cli.model.skeleton import Skeleton
from megatrain_cli.model.template import LayerTemplate, Prologue

# One forward and backward: named results, the same ones each time.
Trial = Callable[[], Mapping[str, Tensor]]

TRIALS = 4

_NAMES = {
    SDPBackend.CUDNN_ATTENTION: "cuDNN",
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient",
    SDPBackend.MATH: "unfused",
}
_SWITCHES = {
    SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.enable_cudnn_sdp,
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.enable_flash_sdp,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.enable_mem_efficient_sdp,
    SDPBackend.MATH: torch.backends.cuda.enable_math_sdp,
}
# cuBLAS' documentation on reproducibility: without one of them, results may differ by stream.
_CUBLAS, _WORKSPACES = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")


@dataclass(frozen=True)
class _Candidate:
    """A way to compute attention that may repeat.

    Attributes:
        backend: The only one that `scaled_dot_product_attention` may take; None where it is not
            called.
        strict: Whether torch refuses all that it does not promise to repeat. It refuses cuDNN's
            attention then, which does repeat (H200, torch 2.11), so there the trials alone decide.
    """

    name: str
    backend: SDPBackend | None
    strict: bool


# The fastest first: 3.8 ms against 14.3 (H200, 16 rows of 2048 tokens, 28 heads over 4 of 128).
_CANDIDATES = {
    "sdpa": (
        _Candidate("cuDNN", SDPBackend.CUDNN_ATTENTION, strict=False),
        _Candidate("memory-efficient", SDPBackend.EFFICIENT_ATTENTION, strict=True),
    ),
    "eager": (_Candidate("eager", None, strict=True),),
    PACKED: (_Candidate("variable-length flash", None, strict=True),),
}
_REMEDIES = {
    "sdpa": "`model.attention: eager`, which is slower and takes more memory",
    PACKED: "`data.packing: false`",
}


def dispatched_kernel(
    config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, rows: int, length: int
) -> str:
    """The kernel that `scaled_dot_product_attention` takes for rows of such a shape, by name.

    Asks torch's own dispatcher. Of a model with windows, those of its layers that need a mask.
    """
    heads: int = config.num_attention_heads
    groups: int = getattr(config, "num_key_value_heads", None) or heads
    width: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    window: int | None = getattr(config, "sliding_window", None)
    masked = window is not None and window <= length  # at `==` transformers makes a mask too

    def make(num_heads: int) -> Tensor:
        shape = (rows, num_heads, length, width)
        return torch.empty(shape, dtype=dtype, device=device, requires_grad=True)

    key = make(heads if masked else groups)
    mask = torch.empty(1, 1, length, length, dtype=torch.bool, device=device) if masked else None
    chosen: int = torch._fused_sdp_choice(
        make(heads), key, key, mask, 0.0, not masked, enable_gqa=not masked and groups < heads
    )
    return _NAMES.get(SDPBackend(chosen), "none")


def settle_repeatable(attention: str, trial: Trial) -> str:
    """Set torch up so that two runs agree to the last bit, and prove it on `trial`.

    Waits for the device. Call before the first matrix product on it.

    Args:
        attention: `sdpa`, `eager` or `packed`.
        trial: What must repeat; see `run_layers_once`.

    Returns:
        The name of the attention kernel.

    Raises:
        DeviceError: Nothing that this machine has repeats.
    """
    if os.environ.get(_CUBLAS) not in _WORKSPACES:
        os.environ[_CUBLAS] = _WORKSPACES[0]
    # Would fill every `torch.empty` with NaN, which costs bandwidth and decides nothing here.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # torch sets it late
    problems = []
    for candidate in _CANDIDATES[attention]:
        torch.use_deterministic_algorithms(True, warn_only=not candidate.strict)
        if candidate.backend is not None:
            for backend, enable in _SWITCHES.items():
                enable(backend is candidate.backend)
        problem = find_difference(trial)
        if problem is None:
            return candidate.name
        problems.append(f"{candidate.name} {problem}")
    remedy = _REMEDIES.get(attention)
    raise DeviceError(
        "train.deterministic is true and no attention kernel of this machine was seen to repeat "
        f"bit for bit: {'; '.join(problems)}. Set {f'{remedy}, or ' if remedy else ''}"
        "`train.deterministic: false`."
    )


def run_layers_once(
    skeleton: Skeleton,
    rows: int,
    length: int,
    device: torch.device,
    layer_function: LayerFunction = run_layer,
) -> dict[str, Tensor]:
    """Forward and backward of the prologue and of one decoder layer of each kind.

    On random weights and tokens, the same in each call. The skeleton's buffers must be on `device`.

    Args:
        skeleton: The model.
        rows: B.
        length: T.
        device: Where to run.
        layer_function: How the run calls its layers.

    Returns:
        Outputs and gradients, by name.
    """
    generator = torch.Generator(device).manual_seed(0)
    dtype, spec = skeleton.dtype, skeleton.spec

    def draw(*shape: int) -> Tensor:
        # Of a size that leaves attention far from uniform.
        return torch.randn(shape, generator=generator, dtype=dtype, device=device) * 0.1

    packed = halved_rows(rows, length, device) if skeleton.is_packed else None
    input_ids = torch.randint(spec.vocab_size, (rows, length), generator=generator, device=device)
    results: dict[str, Tensor] = {}

    def keep(name: str, gradients: tuple[Tensor | None, ...]) -> None:
        found = {f"gradient {i} of {name}": g for i, g in enumerate(gradients) if g is not None}
        results.update(found)

    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)  # of dropout
        prologue = Prologue(skeleton)
        leaves = prologue.leaves(draw(skeleton.layouts[0].numel))
        first, args = prologue(leaves, input_ids, packed)
        above = draw(*first.shape)
        firsts = {layer.kind: index for index, layer in reversed([*enumerate(spec.decoder_layers)])}
        for index in sorted(firsts.values()):
            template = LayerTemplate(skeleton, index)
            own = template.leaves(draw(skeleton.layouts[index + 1].numel))
            source = first.detach().requires_grad_()
            output = layer_function(template, own, source, args[index])
            name = spec.decoder_layers[index].name
            results[f"output of {name}"] = output.detach()
            keep(name, torch.autograd.grad(output, (source, *own), above, allow_unused=True))
        keep(spec.embed.name, torch.autograd.grad(first, leaves, above, allow_unused=True))
    return results


def find_difference(trial: Trial) -> str | None:
    """What differs between several trials, or why there was none; None if all agree."""
    with warnings.catch_warnings():
        # Torch gives a warning for each reason against a kernel, and one that cuDNN's attention
        # might not repeat: just what is found out here.
        warnings.simplefilter("ignore", UserWarning)
        try:
            expected = trial()
        except RuntimeError as error:
            if "No available kernel" in str(error) or "No viable backend" in str(error):
                return "cannot run this model"
            raise
        for _ in range(TRIALS - 1):
            found = trial()
            for name, tensor in expected.items():
                if not _same_bits(tensor, found[name]):
                    return f"gave another {name} the next time"
    return None


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
