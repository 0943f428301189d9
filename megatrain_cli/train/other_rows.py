"""What it means for a run to go on with other rows than before, or with another order of them.

Each was allowed by name. But a position is a number of rows: it does not tell which they were.
"""

from megatrain_cli.checkpoint.facts import DataFacts
from megatrain_cli.data.held_out import HELD_OUT
from megatrain_cli.data.pack import RULE as PACKING
from megatrain_cli.units import show_number


def notes_on_other_rows(saved: DataFacts, now: DataFacts, step: int) -> list[str]:
    """What a person should know of the epoch under way, and of the rows held out.

    Args:
        saved: From the checkpoint.
        now: Of the rows as they are, where the run goes on.
        step: Steps completed there.
    """
    if not now.next_row:
        return []
    notes = []
    # The same rows may lie in other files: whole, in two, or packed.
    if _files(saved) != _files(now) and saved.rows_xxh3_128 != now.rows_xxh3_128:
        epoch, place = divmod(now.next_row, now.num_rows)
        taken = show_number(now.next_row, "row")
        were = "was" if now.next_row == 1 else "were"
        notes.append(
            f"data.train: other files than up to step {step}: {show_number(now.num_rows, 'row')} "
            f"an epoch, {saved.num_rows} then. {taken} {were} taken, so the next one is row "
            f"{place + 1} of epoch {epoch + 1}. Rows are counted and not compared: some may come "
            "again, others not at all"
        )
    elif now.next_row % saved.num_rows and _order(saved) != _order(now):
        notes.append(
            f"from step {step + 1} on rows come in another order, in the middle of epoch "
            f"{now.next_row // saved.num_rows + 1}: some of its rows may be taken twice, others "
            "not at all"
        )
    if _holds_out(now) and not _held_before(saved, now):
        notes.append(
            f"other rows are held out for evaluation than up to step {step}: what of them was "
            "trained on till then makes `eval_loss` too low"
        )
    return notes


def _files(facts: DataFacts) -> tuple[str, ...]:
    return tuple(source.xxh3_128 for source in facts.sources)


def _order(facts: DataFacts) -> tuple[object, ...]:
    """All that decides which row stands at which place."""
    seed = facts.seed if facts.shuffle else None
    packed = facts.rows_xxh3_128 if PACKING in facts.order.split("+") else None
    return facts.order, facts.num_rows, facts.shuffle, seed, packed


def _holds_out(facts: DataFacts) -> bool:
    return HELD_OUT in facts.order.split("+")


def _held_before(saved: DataFacts, now: DataFacts) -> bool:
    """Whether all that is held out was held out before: the lowest hashes of the same rows are."""
    same = (saved.seed, saved.rows_xxh3_128) == (now.seed, now.rows_xxh3_128)
    return same and _holds_out(saved) and now.num_rows >= saved.num_rows
