"""Schedules with a wait too few."""

from dataclasses import replace

from megatrain_cli.pipeline.ops import Op


def without_wait(ops: tuple[Op, ...], position: int, wait: int) -> tuple[Op, ...]:
    """The same ops, but for one wait of one of them."""
    op = ops[position]
    cut = replace(op, waits=op.waits[:wait] + op.waits[wait + 1 :])
    return (*ops[:position], cut, *ops[position + 1 :])
