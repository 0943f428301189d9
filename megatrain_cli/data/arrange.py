"""Which documents share a row, and in which order rows come: of the config and lengths alone."""

import numpy as np

from megatrain_cli.config.schema import TrainConfig
from megatrain_cli.data.load import LoadedData
from megatrain_cli.data.mixing import MixedStream
from megatrain_cli.data.pack import Packs, pack_documents
from megatrain_cli.data.sampler import RowOrder, RowStream, packing_order


def arrange(
    config: TrainConfig, loaded: LoadedData, max_length: int
) -> tuple[Packs | None, RowOrder]:
    """The packs of a run, if it has any, and the order of its rows.

    Args:
        config: What was asked.
        loaded: All documents.
        max_length: Tokens of a row at most: `data.max_length`, or fewer where the model ends.
    """
    seed, shuffle = config.train.seed, config.data.shuffle
    weights = [source.weight for source in loaded.sources]
    counts = loaded.prepared.summary.used_by_source
    is_mixed = any(weight != 1 for weight in weights)
    packs = None
    if config.data.packing:
        lengths = loaded.prepared.examples.lengths
        # Packs are drawn by weight, so each holds documents of one source alone. Without weights
        # the sources mix in them.
        parts = counts if is_mixed else (len(lengths),)
        orders = [packing_order(count, seed) if shuffle else np.arange(count) for count in parts]
        # A document longer than the model's positions is refused for that, and not for its row.
        packs = pack_documents(lengths, orders, max(max_length, int(lengths.max())))
        counts = packs.rows_by_part
    if is_mixed:
        return packs, MixedStream(counts, weights, seed, shuffle)
    return packs, RowStream(sum(counts), seed, shuffle)
