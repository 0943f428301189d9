"""Which tokens a trained model ends its answers with, for those who let it write.

A chat template may end a turn with another token than the tokenizer's `eos_token`; a program that
stops at the latter alone would let such a model write for ever.
"""

from typing import TYPE_CHECKING, cast

import numpy as np

from megatrain_cli.data.marks import find_turn_marks
from megatrain_cli.data.table import Examples
from megatrain_cli.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Tokens that are looked at together: the rows may be more than the machine's RAM.
_PIECE = 1 << 22


def stops_learnt(examples: Examples, tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    """Ids of end tokens that are learnt in a row at least: of a text, of a turn, of a call."""
    return tuple(id_ for id_ in _ends_of(tokenizer) if _is_learnt(examples, id_))


def _ends_of(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """What may end an answer, the tokenizer's `eos_token` first."""
    found = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    if tokenizer.chat_template is not None:
        try:
            marks = find_turn_marks(tokenizer)
        except DataError:  # of no use for chats: the rows are texts or tokens
            return found
        tokens = [marks.token, *([marks.call_end] if marks.call_end != marks.end else [])]
        found += cast("list[int]", tokenizer.convert_tokens_to_ids(tokens))
    return list(dict.fromkeys(found))


def _is_learnt(examples: Examples, token: int) -> bool:
    pieces = (slice(at, at + _PIECE) for at in range(0, len(examples.tokens), _PIECE))
    return any(
        bool(np.any((examples.tokens[part] == token) & examples.is_target[part])) for part in pieces
    )
