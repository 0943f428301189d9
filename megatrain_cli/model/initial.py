"""Random initial weights, as Hugging Face's own code would draw them, one layer at a time.

The random state is keyed by (seed, layer name): the values of a layer depend neither on the order
nor on the thread in which layers are made, nor on the compute dtype. The global random state is
not touched.
"""

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from megatrain_cli.model.recorder import Recorder
from megatrain_cli.model.skeleton import Skeleton
from megatrain_cli.model.spec import LayerSpec

# Everything in torch that draws random numbers and can be told from where.
RANDOM_FUNCTIONS = frozenset(
    {
        *("normal_", "uniform_", "bernoulli_", "cauchy_", "exponential_", "geometric_"),
        *("log_normal_", "random_", "trunc_normal_", "orthogonal_", "sparse_"),
        *("xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_"),
        *("normal", "rand", "randn", "randint", "randperm", "bernoulli", "multinomial"),
    }
)


class SeededDraws(TorchFunctionMode):
    """Adds a generator to every call on this thread that would draw from the global one."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Call `func`, with the generator filled in if it draws."""
        options = dict(kwargs or {})
        if func.__name__ in RANDOM_FUNCTIONS and options.get("generator") is None:
            options["generator"] = self.generator
        return func(*args, **options)


class RandomLayers:
    """Makes initial weights in FP32. Safe to read from several threads at once."""

    def __init__(self, skeleton: Skeleton, seed: int) -> None:
        self._model = skeleton.model
        self._layers = skeleton.layers
        self._spec = skeleton.spec
        self._seed = seed

    def read(self, layer: LayerSpec) -> Iterator[tuple[str, Tensor]]:
        """Yield the full name and the FP32 values of each parameter of a layer, in its order.

        Memory in use is one layer; a tensor is let go once the next one is asked for.
        """
        if layer.prefix:
            index = next(i for i, x in enumerate(self._spec.decoder_layers) if x.name == layer.name)
            root, prefix = copy.deepcopy(self._layers[index]), f"{layer.prefix}."
        else:
            root, prefix = self._without_layers(), ""
        owners = {}
        for param in layer.params:
            path, _, name = param.name.removeprefix(prefix).rpartition(".")
            module = root.get_submodule(path)
            # A second name of a tied weight stays on meta: what is drawn for it goes nowhere.
            module._parameters[name] = nn.Parameter(
                torch.empty(param.shape, dtype=torch.float32), requires_grad=False
            )
            owners[param.name] = (module, name)
        with torch.no_grad(), SeededDraws(self._generator(layer.name)):
            # Children first, as in Hugging Face: a parent may draw its children's weights again.
            root.apply(self._model._init_weights)
        for full_name, (module, name) in owners.items():
            drawn = module._parameters.pop(name)
            assert drawn is not None
            yield full_name, drawn.detach()
            del drawn

    def _generator(self, layer_name: str) -> torch.Generator:
        key = hashlib.blake2b(f"{self._seed}:{layer_name}".encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(key) >> 1)

    def _without_layers(self) -> PreTrainedModel:
        """A copy of the model in which nothing stands for the decoder layers."""
        recorders = [m for m in self._model.modules() if isinstance(m, Recorder)]
        # Known to deepcopy as copied already, so that it does not follow them to every layer.
        memo: dict[int, object] = {id(recorder): nn.Identity() for recorder in recorders}
        return copy.deepcopy(self._model, memo)
