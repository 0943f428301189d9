"""Hypothesis strategies that several test files share."""

from hypothesis import strategies as st

from megatrain_cli.pipeline.shape import PipelineShape


@st.composite
def pipeline_shapes(draw: st.DrawFn) -> PipelineShape:
    """Any shape of a step: up to six decoder layers, every mode."""
    num_layers = draw(st.integers(1, 6)) + 2
    num_slabs = draw(st.integers(0, 4))
    keep = draw(st.integers(0, num_layers - 2))
    pieces = tuple(draw(st.integers(1, 3)) if num_slabs else 1 for _ in range(num_layers))
    return PipelineShape(
        num_layers=num_layers,
        num_micro_batches=draw(st.integers(1, 3)),
        num_slots=draw(st.integers(1, 4)),
        num_slabs=num_slabs,
        pieces=pieces,
        kept=frozenset(range(num_layers - 1 - keep, num_layers - 1)),
        offload=draw(st.booleans()),
        eager=num_slabs > 0 and draw(st.booleans()),
        tied=draw(st.booleans()),
        lookup=draw(st.booleans()),
    )
