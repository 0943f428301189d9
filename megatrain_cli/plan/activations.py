"""How many layers keep their activations, and where the inputs of the others wait.

A kept layer is computed once; any other is computed again before its backward, a third more work
for that layer. Inputs in host RAM cost transfers that compute hides, so they are sent there only
where the device cannot hold them.
"""

from collections.abc import Callable
from dataclasses import dataclass

# (keep_layers, offload) -> whether a run with them fits the machine.
Fits = Callable[[int, bool], bool]


@dataclass(frozen=True)
class Activations:
    """What is kept of forward for backward.

    Attributes:
        keep_layers: How many decoder layers, the last ones, keep their activations.
        offload: Inputs of the others wait in host RAM.
    """

    keep_layers: int
    offload: bool


def choose_activations(num_layers: int, fits: Fits) -> Activations:
    """Keep as many layers as fit; inputs go to the host only if none fits otherwise.

    Where nothing fits, nothing is kept and nothing sent: the shortfall then says what would help.
    """
    for offload in (False, True):
        if fits(num_layers, offload):
            return Activations(num_layers, False)  # without recomputed layers nothing is sent
        if fits(0, offload):
            return Activations(_most(num_layers, fits, offload), offload)
    return Activations(0, False)


def _most(num_layers: int, fits: Fits, offload: bool) -> int:
    """The largest number that fits, given that 0 does and `num_layers` does not."""
    good, bad = 0, num_layers
    while bad - good > 1:
        middle = (good + bad) // 2
        if fits(middle, offload):
            good = middle
        else:
            bad = middle
    return good
