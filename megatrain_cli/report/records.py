"""What one optimizer step, or one evaluation, measured, as plain values."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_NAMES = {math.inf: "Infinity", -math.inf: "-Infinity"}
_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

# Attributes that are tables of numbers by name.
_TABLES = ("phases", "breakdown")

JsonNumber = float | int | str
"""A number in JSON. JSON has no NaN and no infinity: those are the texts of `_NUMBERS`."""


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step.

    Attributes:
        step: Steps completed, this one included; the first is 1.
        loss: Mean over the step's supervised tokens, before the update.
        learning_rate: Used by this step's update.
        grad_norm: Global norm before clipping.
        tokens: Supervised tokens of the step.
        tokens_per_second: Supervised tokens a second.
        seconds: Wall time of the step.
        phases: Seconds by phase; phases may overlap, so their sum may exceed `seconds`.
        epoch: Passes over the data so far, as a fraction.
        rows: Rows of data in the step.
        breakdown: Where the time went: the attributes of `pipeline.breakdown.Breakdown`.
    """

    step: int
    loss: float
    learning_rate: float
    grad_norm: float
    tokens: int
    tokens_per_second: float
    seconds: float
    phases: Mapping[str, float] = field(default_factory=dict)
    epoch: float = 0.0
    rows: int = 0
    breakdown: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, JsonNumber | dict[str, JsonNumber]]:
        """The record as JSON values; the keys are the attributes, tables last."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        tables = {name: values.pop(name) for name in _TABLES}
        numbers = {name: _to_json(value) for name, value in values.items()}
        return numbers | {
            name: {key: _to_json(value) for key, value in table.items()}
            for name, table in tables.items()
        }

    @classmethod
    def from_json(cls, values: object) -> "StepRecord":
        """Invert `to_json`; keys that only a later version writes are left out.

        Raises:
            ValueError: Not an object, or a key is missing or is not a number.
        """
        if not isinstance(values, Mapping):
            raise ValueError("not an object")  # noqa: TRY004 - bad data, not a bad call
        known: dict[str, object] = {}
        for f in dataclasses.fields(cls):
            if f.name in _TABLES:
                table = values.get(f.name, {})
                if not isinstance(table, Mapping):
                    raise ValueError(f"{f.name} is not a mapping")
                known[f.name] = {name: _from_json(name, value) for name, value in table.items()}
            elif f.name in values:
                number = _from_json(f.name, values[f.name])
                known[f.name] = number if f.type is int else float(number)
        try:
            return cls(**known)  # type: ignore[arg-type] # each value was made a number above
        except TypeError as error:
            raise ValueError(f"not a step: {error}") from error


@dataclass(frozen=True)
class EvalRecord:
    """One evaluation.

    Attributes:
        step: Steps completed before it; 0 before the first.
        eval_loss: Mean over the supervised tokens of all rows.
        eval_perplexity: `exp(eval_loss)`.
        eval_tokens: Supervised tokens.
        eval_seconds: Wall time.
    """

    step: int
    eval_loss: float
    eval_perplexity: float
    eval_tokens: int
    eval_seconds: float

    def to_json(self) -> dict[str, JsonNumber]:
        """The record as JSON values; the keys are the attributes."""
        return {name: _to_json(value) for name, value in dataclasses.asdict(self).items()}

    @classmethod
    def from_json(cls, values: Mapping[str, object]) -> "EvalRecord":
        """Invert `to_json`; keys that only a later version writes are left out.

        Raises:
            ValueError: A key is missing or is not a number.
        """
        names = [f.name for f in dataclasses.fields(cls)]
        missing = [name for name in names if name not in values]
        if missing:
            raise ValueError(f"not an evaluation: {missing[0]} is missing")
        found: dict[str, Any] = {name: _from_json(name, values[name]) for name in names}
        return cls(**found)


def perplexity(loss: float) -> float:
    """`exp(loss)`; infinite where that is more than a float holds."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def _to_json(value: float) -> JsonNumber:
    if math.isnan(value):
        return "NaN"
    return _NAMES.get(value, value)


def _from_json(name: str, value: object) -> float:
    if isinstance(value, str) and value in _NUMBERS:
        return _NUMBERS[value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    raise ValueError(f"{name} is not a number")
