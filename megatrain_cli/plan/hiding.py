"""How many micro-batches a step needs so that compute takes as long as the link does.

More rows leave room for fewer kept layers, and what is computed twice takes longer: so each number
is planned.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from megatrain_cli.config.schema import TrainConfig
from megatrain_cli.plan.cost import StepBounds


@dataclass(frozen=True)
class Attempt:
    """What a plan with another number of micro-batches says.

    Attributes:
        passes: Groups of micro-batches that pass through a layer one after the other.
        fits: Whether the run fits, as far as it does without them.
    """

    bounds: StepBounds | None
    passes: int
    fits: bool


@dataclass(frozen=True)
class Enough:
    """Micro-batches of a step that hide the link.

    Attributes:
        tokens: Of such a step.
        fits: As in `Attempt`.
    """

    micro_batches: int
    tokens: int
    fits: bool


# From this many on, one more is little.
_FEW = 16
_MORE = 3


def fewest_that_hide(
    config: TrainConfig, bounds: StepBounds | None, attempt: Callable[[TrainConfig], Attempt]
) -> Enough | None:
    """The fewest that do; None where the link does not bind.

    A number that has no good divisor passes in many small groups. So where one to three more are
    little beside it, the one of them is taken that passes in the fewest.

    Args:
        config: What was asked.
        bounds: Of the plan with that.
        attempt: Plans a config.
    """
    if bounds is None or bounds.binds != "link" or not bounds.compute or bounds.link is None:
        return None
    tried: dict[int, Attempt] = {}

    def hides(micro_batches: int) -> bool:
        asked = {"gradient_accumulation_steps": micro_batches}
        train = config.train.model_copy(update=asked)
        tried[micro_batches] = attempt(config.model_copy(update={"train": train}))
        found = tried[micro_batches].bounds
        assert found is not None
        assert found.compute is not None
        assert found.link is not None
        return found.compute >= found.link

    too_few = config.train.gradient_accumulation_steps
    enough = math.ceil(too_few * bounds.link / bounds.compute)
    while not hides(enough):  # more layers are kept where fewer micro-batches pass together
        too_few, enough = enough, enough + 1 + enough // _FEW
    # Were all layers computed twice there and none here, three quarters would do.
    likely = enough * 3 // 4 - 1
    if likely > too_few and not hides(likely):
        too_few = likely
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if hides(middle):
            enough = middle
        else:
            too_few = middle
    found = [n for n in range(enough, enough + min(_MORE, enough // _FEW) + 1) if hides(n)]
    best = min(found, key=lambda n: (not tried[n].fits, tried[n].passes, n))
    at_best = tried[best].bounds
    assert at_best is not None
    return Enough(best, at_best.tokens, tried[best].fits)
