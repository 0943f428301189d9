"""The sizes in a config.json, looked at before anything is made of them.

A model of a mistyped size takes minutes and all memory to construct, or ends in a line of somebody
else's code that names no field.
"""

from collections.abc import Mapping

from megatrain_cli.errors import ModelError
from megatrain_cli.model.kinds import OTHER_HEADS

_MOST = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 24,
    "num_hidden_layers": 1 << 12,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 14,
}
"""Field -> some thirty times and more of what the largest published models have."""


def check_sizes(place: str, values: Mapping[str, object], names: Mapping[str, str]) -> None:
    """Refuse sizes, and shares that dropout leaves out, that no model has.

    Args:
        place: The file, for messages.
        values: Of config.json, as they were read.
        names: A family's own name of a field, where it has another.

    Raises:
        ModelError: Names field and value.
    """
    for field, most in _MOST.items():
        name = names.get(field, field)
        value = values.get(name)
        if isinstance(value, int) and not 1 <= value <= most:
            wanted = (
                "1 or more" if value < 1 else f"{most} at most, as in all models that are known"
            )
            raise ModelError(f"{place}: `{name}` is {value}, not {wanted}.")
    for name, share in values.items():
        if "drop" not in name.lower() or name.startswith(OTHER_HEADS) or isinstance(share, bool):
            continue
        if isinstance(share, int | float) and not 0 <= share < 1:
            raise ModelError(f"{place}: `{name}` is {share}, not from 0 to below 1.")
