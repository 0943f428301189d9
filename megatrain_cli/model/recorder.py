"""Stand-ins for decoder layers: record what each layer is given, or inject the last layer's output.

With a `Recorder` in the place of every decoder layer, a model's own `forward` does all that the
family does around its layers (embedding scale, learned positions, masks per layer type, rotary
tables, final norm, LM head, soft cap) and never touches a decoder layer's weights.

B batch, T tokens, D width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatrain_cli.errors import InternalError, ModelError


@dataclass(frozen=True)
class LayerArgs:
    """What a decoder layer is called with besides the hidden state.

    Attributes:
        args: Positional arguments after the hidden state.
        kwargs: Keyword arguments; tensors in here are shared between layers, never written.
    """

    args: tuple[object, ...]
    kwargs: dict[str, object]


class LastLayerReachedError(Exception):
    """Unwinds a model's forward once every recorder has seen its call; always caught."""


class Tape:
    """What the recorders of one model write to and read from. Holds tensors only during a call.

    Modes, chosen by whoever runs the forward:
        - recording: each call is kept and the hidden state passes through unchanged;
        - recording with `stops` set: the last recorder ends the forward, so that nothing after the
          decoder layers runs;
        - injecting, while `injected` is set: the last recorder returns it, all others pass on;
        - recording with `learns` set: each recorder runs the layer it replaces once (`is_inside`
          meanwhile), to learn whether it returns a tensor or a tuple.
    """

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.stops = False
        self.learns = False
        self.is_inside = False
        self.injected: Tensor | None = None
        self.hidden: Tensor | None = None
        self.calls: list[LayerArgs] = []

    @property
    def is_complete(self) -> bool:
        """Whether every layer was called."""
        return len(self.calls) == self.num_layers

    def clear(self) -> None:
        """Let go of every tensor and leave all modes."""
        self.stops = False
        self.learns = False
        self.is_inside = False
        self.injected = None
        self.hidden = None
        self.calls = []

    def record(self, layer_index: int, hidden: Tensor, call: LayerArgs) -> None:
        """Keep one call.

        Raises:
            ModelError: The model does not pass one hidden state through its layers in order.
        """
        if layer_index != len(self.calls):
            raise ModelError(
                f"Decoder layer {layer_index} is call number {len(self.calls)} of the forward: "
                "layers that run twice, or not in order, cannot be trained yet."
            )
        if self.hidden is not None and hidden is not self.hidden:
            raise ModelError(
                f"The hidden state is changed between decoder layers {layer_index - 1} and "
                f"{layer_index}: such a model cannot be trained yet."
            )
        self.hidden = hidden
        self.calls.append(call)


class Recorder(nn.Module):
    """Takes the place of one decoder layer and answers attribute look-ups like it."""

    def __init__(self, layer: nn.Module, layer_index: int, tape: Tape) -> None:
        super().__init__()
        # In a tuple, or nn.Module would register it and its parameters as the recorder's own.
        self._replaced = (layer,)
        self._layer_index = layer_index
        self._tape = tape
        # Length of the tuple that the layer returns; None if it returns a tensor.
        self.returns: int | None = None

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        if name == "_replaced":  # not set yet, or gone: no layer to ask
            raise AttributeError(name)
        try:
            return super().__getattr__(name)
        except AttributeError:
            # In truth any type: models ask a layer for strings such as `attention_type`.
            found: Tensor | nn.Module = getattr(self._replaced[0], name)
            return found

    def forward(self, *args: object, **kwargs: object) -> object:
        """Record or inject, as the tape says; returns what the replaced layer would return."""
        hidden, call = split_hidden(args, kwargs)
        tape = self._tape
        is_last = self._layer_index == tape.num_layers - 1
        if tape.injected is not None:
            return self._wrap(tape.injected if is_last else hidden)
        tape.record(self._layer_index, hidden, call)
        if tape.learns:
            tape.is_inside = True
            returned = self._replaced[0](*args, **kwargs)
            tape.is_inside = False
            self.returns = len(returned) if isinstance(returned, tuple) else None
        if is_last and tape.stops:
            raise LastLayerReachedError
        return self._wrap(hidden)

    def _wrap(self, hidden: Tensor) -> object:
        if self.returns is None:
            return hidden
        return (hidden, *[None] * (self.returns - 1))


def split_hidden(args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[Tensor, LayerArgs]:
    """Part a layer's hidden state from its other arguments.

    Raises:
        ModelError: The hidden state is neither the first argument nor called `hidden_states`.
    """
    if args:
        hidden, others = args[0], LayerArgs(args[1:], kwargs)
    else:
        others = LayerArgs((), {k: v for k, v in kwargs.items() if k != "hidden_states"})
        hidden = kwargs.get("hidden_states")
    if not isinstance(hidden, torch.Tensor):
        raise ModelError("A decoder layer is called without a hidden state: cannot be trained yet.")
    return hidden, others


def first_output(returned: object) -> Tensor:
    """The hidden state `(B, T, D)` in what a decoder layer returned, a tensor or a tuple."""
    hidden = returned[0] if isinstance(returned, tuple) else returned
    if not isinstance(hidden, torch.Tensor):
        raise InternalError(f"A decoder layer returned {type(hidden).__name__}, not a tensor.")
    return hidden
