"""A plan with the rows that a run would have, as far as they are soon known.

Rows are mostly shorter than `data.max_length`, and on the CPU what they take follows their tokens.
So where rows were prepared before, or all files are small, their lengths are taken; elsewhere the
plan has room for rows of `data.max_length`, and says so.
"""

from dataclasses import replace

from megatrain_cli.config.load import LoadedConfig
from megatrain_cli.config.schema import TrainConfig
from megatrain_cli.data.load import is_prepared
from megatrain_cli.data.sources import find_sources
from megatrain_cli.errors import MegatrainError
from megatrain_cli.model.skeleton import Skeleton
from megatrain_cli.pipeline.graph_size import measure_graphs
from megatrain_cli.plan.decide import Known
from megatrain_cli.plan.plan import RunPlan, make_plan
from megatrain_cli.train.rows import TrainingRows, load_rows
from megatrain_cli.units import GIB, MIB, show_bytes, show_number

READ_BYTES = 4 * MIB
"""Files that are tokenised for a plan: a few seconds."""

HASHED_BYTES = 2 * GIB
"""Files that are read to tell whether their rows were prepared before."""


def look_ahead(loaded: LoadedConfig, skeleton: Skeleton, plan: RunPlan) -> RunPlan:
    """The plan again, with lengths of rows and, on the CPU at hand, with what graphs keep.

    Args:
        loaded: What is asked.
        skeleton: Its model.
        plan: Made before the data was known.
    """
    rows, said = _find_rows(loaded.config, plan)
    if rows is not None:
        return with_rows(loaded.config, skeleton, plan, rows, said)
    return _again(loaded.config, skeleton, plan, replace(plan.known, rows_from=said))


def with_rows(
    config: TrainConfig, skeleton: Skeleton, plan: RunPlan, rows: TrainingRows, said: str = ""
) -> RunPlan:
    """The plan again, for rows that are known; `said` is how they became so."""
    known = replace(plan.known, length=rows.longest, rows=rows.facts, rows_from=said)
    return _again(config, skeleton, plan, known)


def is_hopeless(config: TrainConfig, skeleton: Skeleton, plan: RunPlan) -> bool:
    """Whether not even rows of one token would fit: then nothing need be read or measured."""
    known = replace(plan.known, length=1)
    shortest = make_plan(
        config, skeleton.spec, skeleton.layouts, plan.machine, known, advised=False
    )
    return bool(shortest.shortfalls)


def _again(config: TrainConfig, skeleton: Skeleton, plan: RunPlan, known: Known) -> RunPlan:
    found = make_plan(config, skeleton.spec, skeleton.layouts, plan.machine, known)
    # A rehearsal measures on a GPU itself. A layer may be more than this machine can hold.
    if plan.machine.has_cuda or is_hopeless(config, skeleton, plan):
        return found
    known = replace(known, measured=measure_graphs(skeleton, found.decisions))
    return make_plan(config, skeleton.spec, skeleton.layouts, plan.machine, known)


def _find_rows(config: TrainConfig, plan: RunPlan) -> tuple[TrainingRows | None, str]:
    """The rows if they are soon known, and a line on that."""
    data, bound = config.data, f"each may have {show_number(plan.decisions.max_length, 'token')}"
    try:
        sources = [*find_sources(data), *(find_sources(data, data.eval) if data.eval else ())]
        if any(source.hub for source in sources):
            return None, f"not read, as some are of a hub: {bound}"
        size = sum(path.stat().st_size for source in sources for path in source.files)
        if size <= READ_BYTES:
            data, how = data.model_copy(update={"cache_dir": None}), "read"
        elif size <= HASHED_BYTES and is_prepared(config):
            how = "prepared before"
        else:
            return None, f"{show_bytes(size)} not read: {bound}"
        rows = load_rows(config.model_copy(update={"data": data}), plan.decisions)
    except (MegatrainError, OSError) as error:
        # A plan may be asked for before all is in place; `train` refuses what is not.
        return None, f"not known ({str(error).splitlines()[0]}): {bound}"
    longest = show_number(int(rows.row_lengths.max()), "token")
    found = f"longest {longest}, all {show_number(rows.rows_per_epoch, 'row')} {how}"
    return rows, "; ".join([found, *rows.repeats])
