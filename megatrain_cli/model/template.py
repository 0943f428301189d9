"""The three parts of a forward pass, with weights bound as views of a flat run.

    hidden, args = prologue(prologue.leaves(embed_run), input_ids, packed)
    for i in ...: hidden = template[i](template[i].leaves(layer_run), hidden, args[i])
    logits = head(head.leaves(head_run), head.tied_leaves(embed_run), hidden[positions])

Nothing here keeps a weight, a gradient or a graph between calls. Where `spec.has_dropout`, the
modules are in training mode: seed the random state before a call, and alike before its recompute.

B batch, T tokens, D width, V vocabulary, N flat positions.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils._pytree import tree_leaves
from transformers import masking_utils

from megatrain_cli.errors import InternalError, ModelError
from megatrain_cli.model.attention import PackedRows
from megatrain_cli.model.layout import LayerLayout
from megatrain_cli.model.recorder import LastLayerReachedError, LayerArgs, first_output
from megatrain_cli.model.skeleton import Skeleton


def make_leaves(flat: Tensor, layout: LayerLayout) -> list[Tensor]:
    """Views of a flat run `(numel,)` in the shapes of the layer's parameters, in layout order.

    Copies nothing. Each is a leaf that requires grad; gradients have the run's dtype.
    """
    return [
        flat[entry.offset : entry.end].view(entry.param.shape).detach().requires_grad_()
        for entry in layout.entries
    ]


class Prologue:
    """All that comes before the decoder layers, run by the model's own forward."""

    def __init__(self, skeleton: Skeleton) -> None:
        self._model = skeleton.model
        self._is_packed = skeleton.is_packed
        self._tape = skeleton.tape
        self._layout = skeleton.layouts[0]
        self._names = [param.name for param in skeleton.spec.embed.params]

    def leaves(self, flat: Tensor) -> list[Tensor]:
        """See `make_leaves`; `flat` is the run of `embed`."""
        return make_leaves(flat, self._layout)

    def __call__(
        self, leaves_embed: Sequence[Tensor], input_ids: Tensor, packed: PackedRows | None = None
    ) -> tuple[Tensor, tuple[LayerArgs, ...]]:
        """Embed tokens.

        Rows may be padded on the right: under causal attention that cannot reach the tokens
        before it, so no mask is made for padding. Does not wait for the device.

        Args:
            leaves_embed: As `leaves` makes them.
            input_ids: `(B, T)` int64, on the device of the leaves.
            packed: Where the documents of the rows lie; None is one document a row. Only of a
                skeleton whose attention is `packed`.

        Returns:
            The hidden state `(B, T, D)` that the first decoder layer is given, and what else each
            layer is given. The arguments carry no gradient.

        Raises:
            ModelError: A decoder layer is given something else that needs a gradient.
        """
        weights = dict(zip(self._names, leaves_embed, strict=True))
        tape = self._tape
        tape.stops = True
        try:
            with _rows_are_not_packed():
                functional_call(
                    self._model, weights, (input_ids,), self._arguments(packed), tie_weights=False
                )
        except LastLayerReachedError:
            hidden, calls = tape.hidden, tuple(tape.calls)
        else:
            raise InternalError("The forward ended before it reached the last decoder layer.")
        finally:
            tape.clear()
        if any(isinstance(x, Tensor) and x.requires_grad for x in _tensors(calls)):
            raise ModelError(
                f"{type(self._model).__name__} gives its decoder layers more than one input that "
                "needs a gradient: such a model cannot be trained yet."
            )
        assert hidden is not None
        return hidden, calls

    def _arguments(self, packed: PackedRows | None) -> dict[str, Tensor]:
        if packed is None:
            return {}
        if not self._is_packed:
            raise InternalError(
                "Packed rows were given to a model whose attention does not part them."
            )
        # A compiled layer then takes any number of documents without being compiled again.
        torch._dynamo.mark_dynamic(packed.starts, 0)
        return {"position_ids": packed.position_ids, "document_starts": packed.starts}


class LayerTemplate:
    """One decoder layer without weights of its own."""

    def __init__(self, skeleton: Skeleton, layer_index: int) -> None:
        layer = skeleton.spec.decoder_layers[layer_index]
        self._module = skeleton.layers[layer_index]
        self._layout = skeleton.layouts[layer_index + 1]
        self._names = [param.name.removeprefix(f"{layer.prefix}.") for param in layer.params]

    def leaves(self, flat: Tensor) -> list[Tensor]:
        """See `make_leaves`; `flat` is the run of this layer."""
        return make_leaves(flat, self._layout)

    def __call__(self, leaves: Sequence[Tensor], hidden: Tensor, args: LayerArgs) -> Tensor:
        """Run the layer: hidden state `(B, T, D)` in, hidden state `(B, T, D)` out."""
        weights = dict(zip(self._names, leaves, strict=True))
        # Without the search for tied weights, a call costs half as much on the host.
        returned = functional_call(
            self._module, weights, (hidden, *args.args), args.kwargs, tie_weights=False
        )
        return first_output(returned)


class Head:
    """All that comes after the decoder layers, run by the model's own forward."""

    def __init__(self, skeleton: Skeleton) -> None:
        spec = skeleton.spec
        self._model = skeleton.model
        self._tape = skeleton.tape
        self._layout = skeleton.layouts[-1]
        self._embed_layout = skeleton.layouts[0]
        self._names = [param.name for param in spec.head.params]
        self._tied = spec.tied
        self._second_names = [(second, first) for second, first in skeleton.aliases.items()]
        self._untied_embed = [p for p in spec.embed.params if p.name not in spec.tied]

    def leaves(self, flat: Tensor) -> list[Tensor]:
        """See `make_leaves`; `flat` is the run of `head`."""
        return make_leaves(flat, self._layout)

    def tied_leaves(self, flat_embed: Tensor) -> list[Tensor]:
        """Leaves of the weights that the head shares with `embed`, in the order of `spec.tied`."""
        entries = [self._embed_layout.by_name[name] for name in self._tied]
        return [
            flat_embed[e.offset : e.end].view(e.param.shape).detach().requires_grad_()
            for e in entries
        ]

    def __call__(
        self, leaves_head: Sequence[Tensor], leaves_tied: Sequence[Tensor], hidden: Tensor
    ) -> Tensor:
        """Logits `(N, V)` for hidden states `(N, D)` after the last decoder layer.

        In the dtype that the model itself returns. Does not wait for the device.
        """
        weights = dict(zip(self._names, leaves_head, strict=True))
        weights |= zip(self._tied, leaves_tied, strict=True)
        weights |= {second: weights[name] for second, name in self._second_names if name in weights}
        # The model embeds one token of zeros on its way to the layers: positions stay in range
        # and masks are 1 x 1, however many hidden states are injected. Weights that only this
        # token meets are one zero, expanded.
        zero = hidden.new_zeros(())
        weights |= {p.name: zero.expand(p.shape) for p in self._untied_embed}
        tape = self._tape
        # As N rows of one token, so that (B, T) of the zero token, (1, 1), differs in B only.
        tape.injected = hidden.unsqueeze(1)
        try:
            outputs = functional_call(
                self._model,
                weights,
                kwargs={
                    "inputs_embeds": zero.expand(1, 1, hidden.shape[-1]),
                    # A ready 4-d mask is taken as it is.
                    "attention_mask": zero.expand(1, 1, 1, 1),
                },
                tie_weights=False,
            )
        finally:
            tape.clear()
        logits: Tensor = outputs.logits
        return logits.squeeze(1)


def _tensors(calls: Sequence[LayerArgs]) -> list[object]:
    return [x for call in calls for x in tree_leaves((call.args, call.kwargs))]


@contextmanager
def _rows_are_not_packed() -> Iterator[None]:
    """Tell the model's mask code what it would ask the device: positions just count up.

    `find_packed_sequence_indices` reads one value back from the device to learn that a row holds
    one sequence, which would make the host wait for all queued work. No position ids are given
    here, so it is known.
    """
    found = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = _none
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = found


def _none(position_ids: Tensor) -> None:
    """No packed sequence."""
