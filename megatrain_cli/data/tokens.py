"""A row that is tokens already: ids, and which of them are learnt."""

from megatrain_cli.data.fields import Fields, show_kind
from megatrain_cli.units import show_number

IGNORED = -100

# What other tools call the tokens to learn. Passed over, everything would be learnt.
_OTHER_MASKS = ("completion_mask", "assistant_masks", "loss_mask")


def read_tokens(fields: Fields) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Token ids, and labels where the row has them.

    A label is -100 or the id of the token in its own place: the loss shifts, so labels that were
    shifted already would teach every second token.

    Raises:
        RowError: A list is missing, of another length, or holds what cannot be honoured.
    """
    input_ids = _whole_numbers(fields, "input_ids", fields.items("input_ids"))
    for place, token in enumerate(input_ids, start=1):
        if token < 0:
            raise fields.refuse("input_ids", f"item {place} is below 0")
    if any(item != 1 for item in _beside(fields, "attention_mask", input_ids)):
        raise fields.refuse(
            "attention_mask", "not all ones: padding and other masks cannot be kept. Remove them."
        )
    for other in _OTHER_MASKS:
        if any(item != 1 for item in fields.optional_items(other)):
            raise fields.refuse(
                other, "not all ones, and not read. Write `labels`: -100 where nothing is learnt."
            )
    if len(fields.optional_items("seq_lengths")) > 1:
        raise fields.refuse("seq_lengths", "several documents in a row. Write one a row.")
    positions = _beside(fields, "position_ids", input_ids)
    if positions and positions != tuple(range(len(input_ids))):
        raise fields.refuse(
            "position_ids", "not 0, 1, 2, ...: several documents in a row. Write one a row."
        )
    labels = _beside(fields, "labels", input_ids) or None
    for place, (label, token) in enumerate(zip(labels or (), input_ids, strict=False), start=1):
        if label not in (IGNORED, token):
            raise fields.refuse(
                "labels",
                f"item {place} is neither -100 nor the id of its own token (not shifted)",
            )
    return input_ids, labels


def _beside(fields: Fields, field: str, input_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Whole numbers, as many as tokens; none where the field is left out."""
    numbers = _whole_numbers(fields, field, fields.optional_items(field))
    if numbers and len(numbers) != len(input_ids):
        raise fields.refuse(
            field, f"{show_number(len(numbers), 'item')} for {show_number(len(input_ids), 'token')}"
        )
    return numbers


def _whole_numbers(fields: Fields, field: str, items: list[object]) -> tuple[int, ...]:
    numbers = []
    for place, item in enumerate(items, start=1):
        if not isinstance(item, int) or isinstance(item, bool):
            kind = "a number that is not whole" if isinstance(item, float) else show_kind(item)
            raise fields.refuse(field, f"item {place} is {kind}; whole numbers are expected")
        numbers.append(item)
    return tuple(numbers)
