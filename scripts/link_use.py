"""How much of what the link could have carried it did carry, while copies were under way."""

from collections.abc import Mapping, Sequence

from megatrain_cli.plan.rates import LinkRate


def link_use(parts: Mapping[str, float], link: Sequence[LinkRate]) -> tuple[float, float]:
    """Shares of the link's measured peak, to the device and from it; 0 where nothing was moved.

    What one direction could have carried is its peak alone for as long as it was in use alone, and
    its peak with both in use for as long as both were: bytes / (seconds alone x peak alone +
    seconds both ways x peak both ways).

    Args:
        parts: Of a step, as `Breakdown` names them.
        link: As `megatrain probe` measured it.
    """
    together = max(point.both_ways for point in link)
    both = parts["both_ways_seconds"]

    def share(direction: str, alone: float) -> float:
        seconds = parts[f"{direction}_seconds"]
        possible = (seconds - both) * alone + both * together
        return parts[f"{direction}_bytes"] / possible if possible else 0.0

    return (
        share("stream_in", max(point.to_device for point in link)),
        share("stream_out", max(point.to_host for point in link)),
    )
