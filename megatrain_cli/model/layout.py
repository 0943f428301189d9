"""Where each parameter lies in its layer's contiguous run: the one offset table of the program.

Store, staging buffers, slabs, gradients, optimizer and shards all read this table; nobody else
computes an offset.
"""

from dataclasses import dataclass
from functools import cached_property

from megatrain_cli.model.spec import LayerSpec, ParamSpec
from megatrain_cli.units import round_up

# In elements: 256 bytes of BF16, so that every parameter starts on the alignment that the fastest
# GPU loads want. Also a multiple of 64, the grain at which the optimizer may cut a run.
ALIGNMENT = 128


@dataclass(frozen=True)
class Entry:
    """One parameter's place: elements `[offset, offset + numel)` of the run."""

    param: ParamSpec
    offset: int

    @property
    def end(self) -> int:
        """One past the last element."""
        return self.offset + self.param.numel


@dataclass(frozen=True)
class LayerLayout:
    """The run of one layer, `numel` elements long, gaps included."""

    layer: LayerSpec
    entries: tuple[Entry, ...]
    numel: int

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Ranges `[start, end)` that belong to no parameter: alignment, always zero."""
        ends = [entry.end for entry in self.entries]
        starts = [entry.offset for entry in self.entries[1:]] + [self.numel]
        return tuple((end, start) for end, start in zip(ends, starts, strict=True) if end < start)

    @cached_property
    def by_name(self) -> dict[str, Entry]:
        """Entries by the parameter's full name."""
        return {entry.param.name: entry for entry in self.entries}


def make_layout(layer: LayerSpec) -> LayerLayout:
    """Lay a layer's parameters one after the other, each start aligned to `ALIGNMENT` elements."""
    entries = []
    offset = 0
    for param in layer.params:
        entries.append(Entry(param, offset))
        offset = round_up(offset + param.numel, ALIGNMENT)
    return LayerLayout(layer, tuple(entries), offset)
