"""What the config format has and this version cannot do yet, refused by name.

Each line goes when the part arrives. Until then a key that would do nothing is an error, not a
surprise.
"""

from collections.abc import Iterator

from megatrain_cli.config.rules import Finding
from megatrain_cli.config.schema import TrainConfig

_NOT_YET = "is not in this version"


def find_not_yet(config: TrainConfig) -> Iterator[Finding]:
    """Values that a later version will accept."""
    model, pipeline = config.model, config.pipeline
    if model.attention in {"flash_attention_2", "flex_attention"}:
        yield Finding("model.attention", f"`{model.attention}` {_NOT_YET}; use `auto` or `sdpa`")
    if model.trust_remote_code:
        yield Finding(
            "model.trust_remote_code",
            f"true {_NOT_YET}; use a model that transformers itself supports",
        )
    if pipeline.staging_bytes != "auto":
        yield Finding("pipeline.staging_bytes", f"a size {_NOT_YET}; use `auto`: the largest layer")
    if config.logging.tensorboard is True:
        yield Finding(
            "logging.tensorboard", f"true {_NOT_YET}; use `auto` and read `metrics.jsonl`"
        )
