"""What a model's folder and the rest of a run must agree on, looked at before memory is taken."""

from pathlib import Path

from megatrain_cli.config.schema import TrainConfig
from megatrain_cli.data.table import Examples
from megatrain_cli.errors import ModelError
from megatrain_cli.model.skeleton import Skeleton
from megatrain_cli.store.source import SafetensorsSource
from megatrain_cli.units import show_number


def check_examples(examples: Examples, skeleton: Skeleton, folder: Path) -> None:
    """Refuse rows that the model has no tokens or no positions for.

    Raises:
        ModelError: The tokenizer belongs to another model, or a row is longer than the model goes.
    """
    longest, limit = int(examples.lengths.max()), skeleton.spec.max_positions
    if limit is not None and longest > limit:
        raise ModelError(
            f"The longest row has {show_number(longest, 'token')} and {skeleton.spec.architecture} "
            f"in {folder} has {show_number(limit, 'position')}. Set `data.max_length: {limit}`."
        )
    largest = int(examples.tokens.max())
    if largest >= skeleton.spec.vocab_size:
        raise ModelError(
            f"The tokenizer in {folder} gives token {largest} and the model's vocabulary has "
            f"{skeleton.spec.vocab_size} entries: they do not belong together."
        )


def weights_of(config: TrainConfig, skeleton: Skeleton) -> SafetensorsSource:
    """The folder's weights, of which names, shapes and dtypes alone have been read.

    Raises:
        ModelError: They and the model's parameters do not match.
        CorruptError: A file is damaged.
    """
    return SafetensorsSource(
        Path(config.model.path),
        skeleton.spec,
        base_prefix=skeleton.base_prefix,
        ignored=skeleton.ignored_keys,
        aliases=skeleton.aliases,
    )
