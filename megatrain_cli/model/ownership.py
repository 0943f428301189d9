"""Which layer owns which parameter, learned by following one forward without weights.

A parameter that is used before the decoder layers belongs to `embed`, one that is used after them
to `head`; one that is used on both sides is tied, and `embed` owns it. So no name of a norm, an
embedding or a projection is known here.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from megatrain_cli.errors import ModelError
from megatrain_cli.model.recorder import Recorder, Tape


@dataclass(frozen=True)
class Ownership:
    """Names of parameters by owner, each in the model's own order.

    Attributes:
        embed: Used before the decoder layers, or on both sides.
        layers: Of each decoder layer.
        head: Used after the decoder layers only.
        tied: Those of `embed` that are used after the decoder layers as well.
        aliases: Second names of shared parameters -> the first name.
    """

    embed: tuple[str, ...]
    layers: tuple[tuple[str, ...], ...]
    head: tuple[str, ...]
    tied: tuple[str, ...]
    aliases: dict[str, str]


def find_layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Path and list of the decoder layers: the one list of `num_hidden_layers` modules.

    Raises:
        ModelError: There is no such list, or more than one.
    """
    num_layers = model.config.num_hidden_layers
    found: dict[str, nn.ModuleList] = {}
    for path, module in model.named_modules():
        inside_found = any(path.startswith(f"{outer}.") for outer in found)
        if isinstance(module, nn.ModuleList) and len(module) == num_layers and not inside_found:
            found[path] = module
    if len(found) != 1:
        raise ModelError(
            f"{type(model).__name__} has {len(found)} lists of {num_layers} modules where one, "
            "the decoder layers, is needed: such a model cannot be trained yet."
        )
    return found.popitem()


def replace_layers(layers: nn.ModuleList, tape: Tape) -> tuple[nn.Module, ...]:
    """Put a recorder in the place of each decoder layer, for good; returns the layers."""
    replaced = tuple(layers)
    for index, layer in enumerate(replaced):
        layers[index] = Recorder(layer, index, tape)
    return replaced


def find_owners(
    model: PreTrainedModel,
    names: Mapping[str, nn.Parameter],
    layers: tuple[nn.Module, ...],
    tape: Tape,
) -> Ownership:
    """Assign every parameter to one layer, and teach the recorders what their layers return.

    Args:
        model: With recorders in the place of its decoder layers.
        names: Every name of every parameter of the whole model, shared ones under each name.
        layers: The replaced decoder layers.
        tape: The recorders' tape; left clear.

    Raises:
        ModelError: Layers share a parameter, or a parameter belongs nowhere.
    """
    first_names: dict[int, str] = {}
    for name, param in names.items():
        first_names.setdefault(id(param), name)
    aliases = {n: first_names[id(p)] for n, p in names.items() if first_names[id(p)] != n}

    owner: dict[str, int] = {}
    for index, layer in enumerate(layers):
        for param in layer.parameters():
            name = first_names[id(param)]
            if name in owner:
                raise ModelError(
                    f"Decoder layers {owner[name]} and {index} share the parameter `{name}`: "
                    "such a model cannot be trained yet."
                )
            owner[name] = index

    with _buffers_on_meta(layers):
        before, after = _follow_forward(model, first_names, tape)
    shared = sorted((before | after) & owner.keys())
    if shared:
        raise ModelError(
            f"`{shared[0]}` is used by decoder layer {owner[shared[0]]} and outside of it: "
            "such a model cannot be trained yet."
        )
    order = tuple(first_names.values())
    unused = [n for n in order if n not in owner and n not in before and n not in after]
    if unused:
        raise ModelError(
            f"No part of {type(model).__name__}'s forward uses `{unused[0]}` "
            f"({len(unused)} such parameters): such a model cannot be trained yet."
        )
    return Ownership(
        embed=tuple(n for n in order if n in before),
        layers=tuple(
            tuple(n for n in order if owner.get(n) == index) for index in range(len(layers))
        ),
        head=tuple(n for n in order if n in after and n not in before),
        tied=tuple(n for n in order if n in after and n in before),
        aliases=aliases,
    )


@contextmanager
def _buffers_on_meta(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Layers meet meta tensors meanwhile, and so must their buffers, such as biases of routers."""
    owners = [module._buffers for layer in layers for module in layer.modules() if module._buffers]
    kept = [dict(buffers) for buffers in owners]
    for buffers in owners:
        buffers.update({k: b if b is None else b.to("meta") for k, b in buffers.items()})
    try:
        yield
    finally:
        for buffers, real in zip(owners, kept, strict=True):
            buffers.update(real)


class _UseLog(TorchDispatchMode):
    """Notes each parameter that an operator reads, before or after the decoder layers."""

    def __init__(self, first_names: Mapping[int, str], tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self.first_names = first_names
        self.tape = tape
        self.before: set[str] = set()
        self.after: set[str] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if self.tape.is_inside:
            return func(*args, **(kwargs or {}))
        used = self.after if self.tape.is_complete else self.before
        for value in tree_leaves((args, dict(kwargs or {}))):
            if id(value) in self.first_names:
                used.add(self.first_names[id(value)])
        return func(*args, **(kwargs or {}))


def _follow_forward(
    model: PreTrainedModel,
    first_names: Mapping[int, str],
    tape: Tape,
) -> tuple[set[str], set[str]]:
    """Run the forward on two meta tokens; parameters used before and after the decoder layers."""
    input_ids = torch.zeros(1, 2, dtype=torch.long, device="meta")
    # A ready 4-d mask is taken as it is: making one would ask meta tensors for their values.
    mask = torch.ones(1, 1, 2, 2, dtype=torch.bool, device="meta")
    log = _UseLog(first_names, tape)
    tape.learns = True
    try:
        with torch.no_grad(), log:
            model(input_ids=input_ids, attention_mask=mask, use_cache=False)
        if not tape.is_complete:
            raise ModelError(
                f"{type(model).__name__} calls {len(tape.calls)} of its {tape.num_layers} decoder "
                "layers: such a model cannot be trained yet."
            )
    except (RuntimeError, ValueError) as error:
        # An operator needs a value that a meta tensor lacks, or another mask was expected.
        raise ModelError(
            f"The forward of {type(model).__name__} cannot be followed without weights: {error}"
        ) from error
    finally:
        tape.clear()
    return log.before, log.after
