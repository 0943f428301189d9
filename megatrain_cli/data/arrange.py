"""Which documents share a row, and in which order rows come: of the config and lengths alone."""

import numpy as np

from megatrain_cli.config.schema import TrainConfig
from megatrain_cli.data.held_out import Documents, hold_out
from megatrain_cli.data.load import LoadedData
from megatrain_cli.data.mixing import MixedStream
from megatrain_cli.data.pack import Packs, pack_documents
from megatrain_cli.data.sampler import RowOrder, RowStream, packing_order
from megatrain_cli.errors import ConfigError
from megatrain_cli.units import show_number


def hold_out_rows(config: TrainConfig, loaded: LoadedData) -> tuple[Documents, Documents | None]:
    """The documents to train on, and those of them that `data.eval_share` holds out.

    Raises:
        ConfigError: None is left to train on.
    """
    examples, share = loaded.prepared.examples, config.data.eval_share
    if share is None:
        return Documents(examples), None
    documents, held_out = hold_out(examples, share, config.train.seed)
    if not len(documents):
        raise ConfigError(
            f"data.eval_share: {share:g} of {show_number(len(examples), 'row')}, and rows equal to "
            "them, leave none to train on. Give more rows, or name some in `data.eval`"
        )
    return documents, held_out


def arrange(
    config: TrainConfig, loaded: LoadedData, documents: Documents, max_length: int
) -> tuple[Packs | None, RowOrder]:
    """The packs of a run, if it has any, and the order of its rows.

    Args:
        config: What was asked.
        loaded: All documents.
        documents: Those to train on; packs name them by their places here.
        max_length: Tokens of a row at most: `data.max_length`, or fewer where the model ends.
    """
    seed, shuffle = config.train.seed, config.data.shuffle
    weights = [source.weight for source in loaded.sources]
    counts = documents.by_source(loaded.prepared.summary.used_by_source)
    is_mixed = any(weight != 1 for weight in weights)
    packs = None
    if config.data.packing:
        lengths = documents.lengths
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
