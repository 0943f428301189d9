"""How fast the GPU multiplies, and how fast it, or the cores, compute a decoder layer."""

import statistics
from collections.abc import Callable
from functools import partial

import torch
from transformers import AutoConfig, AutoModel

from megatrain_cli.measure.stopwatch import Stopwatch
from megatrain_cli.plan.rates import IssueCost

LayerCall = Callable[..., object]

# Calls before those that are timed, which are at least as many.
_WARM_UP = 5

# Calls in a row, so that issuing them from Python is hidden behind computing.
_IN_A_ROW = 5
_NEW_LENGTHS = 5


def measure_matmul(device: torch.device, size: int, stopwatch: Stopwatch, budget: float) -> float:
    """Operations a second of a square product."""
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    out = torch.empty_like(a)
    work = partial(torch.mm, a, b, out=out)
    seconds = stopwatch.median(partial(_seconds, device, work), budget)
    return 2 * size**3 / seconds


class Layer:
    """A decoder layer of the Qwen2 kind with random weights, and what it is called with.

    Args:
        device: Where.
        width: Hidden size; 128 a head, 8 heads a key, an MLP of four times the width.
        tokens: Rows, and tokens a row.
        dtype: Of weights and hidden states.
    """

    def __init__(
        self,
        device: torch.device,
        width: int,
        tokens: tuple[int, int],
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        heads = max(width // 128, 1)
        config = AutoConfig.for_model(
            "qwen2",
            vocab_size=128,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=1,
            num_attention_heads=heads,
            num_key_value_heads=max(heads // 8, 1),
        )
        with torch.device(device):
            model = AutoModel.from_config(config, dtype=dtype, attn_implementation="sdpa")
            hidden = torch.randn(*tokens, width, dtype=dtype)
            positions = torch.arange(tokens[1]).unsqueeze(0)
            self._rotary = model.rotary_emb(hidden, positions)
        self._hidden = hidden.requires_grad_()
        self._gradient = torch.randn_like(hidden)
        self.module: torch.nn.Module = model.layers[0]
        self.flops: int = (
            6 * sum(p.numel() for p in self.module.parameters()) * tokens[0] * tokens[1]
        )

    def run(self, call: LayerCall) -> None:
        """Forward and backward once through `call`, the module or its compiled form."""
        self.backward(self.forward(call))

    def forward(self, call: LayerCall) -> torch.Tensor:
        """What comes out of `call`."""
        found = call(self._hidden, attention_mask=None, position_embeddings=self._rotary)
        out = found[0] if isinstance(found, tuple) else found
        assert isinstance(out, torch.Tensor)
        return out

    def backward(self, out: torch.Tensor) -> None:
        """From what came out of `forward`; the gradients are dropped."""
        out.backward(self._gradient)
        self.module.zero_grad(set_to_none=True)
        self._hidden.grad = None


def measure_layer(
    device: torch.device, layer: Layer, call: LayerCall, stopwatch: Stopwatch, budget: float
) -> float:
    """Operations a second, counted as 6 x parameters x tokens.

    Args:
        device: A CUDA device.
        layer: Has the inputs.
        call: Its module or the compiled form.
        stopwatch: What measures.
        budget: Seconds for all of it.
    """
    work = partial(layer.run, call)
    return layer.flops / stopwatch.median(partial(_seconds, device, work), budget)


def measure_issue(
    device: torch.device, layer: Layer, call: LayerCall, stopwatch: Stopwatch, budget: float
) -> IssueCost:
    """How long a thread is busy with a layer until the device has all of its work, on average.

    One by one, each forward when the device has nothing to do. No median: beside an optimizer some
    calls take ten times as long as alone, and a step takes their sum.

    Args:
        device: A CUDA device.
        layer: Has the inputs.
        call: Its module or the compiled form; called before.
        stopwatch: Has the clock.
        budget: Seconds for all of it.
    """
    stream = torch.cuda.current_stream(device)
    forward: list[float] = []
    backward: list[float] = []
    end = stopwatch.clock() + budget
    while len(forward) < 2 * _WARM_UP or stopwatch.clock() < end:
        stream.synchronize()
        outputs: list[torch.Tensor] = []
        forward.append(stopwatch.seconds_of(lambda: outputs.append(layer.forward(call))))  # noqa: B023
        backward.append(stopwatch.seconds_of(lambda: layer.backward(outputs.pop())))  # noqa: B023
    stream.synchronize()
    return IssueCost(*(statistics.fmean(found[_WARM_UP:]) for found in (forward, backward)))


def measure_cpu_layer(layer: Layer, stopwatch: Stopwatch, budget: float) -> float:
    """Operations a second of all cores that torch uses, counted as `measure_layer` does."""
    work = partial(layer.run, layer.module)
    return layer.flops / stopwatch.median(partial(stopwatch.seconds_of, work), budget)


def measure_new_products(
    width: int, tokens: int, dtype: torch.dtype, stopwatch: Stopwatch
) -> float:
    """Seconds that a row takes more for each shape of weights when it is the first of its length.

    oneDNN makes kernels for each shape, and computes BF16; FP32 is computed by another library.

    Args:
        width: Of the layer.
        tokens: Rows are up to twice as long.
        dtype: Of the layer.
        stopwatch: Has the clock.
    """
    first = Layer(torch.device("cpu"), width, (1, tokens), dtype)
    first.run(first.module)
    shapes = {p.shape for p in first.module.parameters() if p.dim() > 1}
    found = []
    for i in range(1, _NEW_LENGTHS + 1):
        layer = Layer(torch.device("cpu"), width, (1, tokens + i * tokens // _NEW_LENGTHS), dtype)
        layer.module = first.module  # whose memory has been touched
        new, known = (stopwatch.seconds_of(partial(layer.run, layer.module)) for _ in range(2))
        found.append(new - known)
    return max(0.0, statistics.median(found)) / len(shapes)


def compile_layer(layer: Layer) -> LayerCall | str:
    """The layer's module with `torch.compile`, called once; or why it failed, on one line."""
    # Dynamo and Inductor raise kinds of RuntimeError; a missing compiler or Triton the others.
    try:
        call = torch.compile(layer.module, dynamic=False)
        layer.run(call)
    except (RuntimeError, OSError, ImportError) as error:
        lines = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {lines[0]}"
    return call


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    stream = torch.cuda.current_stream(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(stream)
    for _ in range(_IN_A_ROW):
        work()
    end.record(stream)
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1e3 / _IN_A_ROW
