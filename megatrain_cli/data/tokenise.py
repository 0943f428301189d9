"""Texts as token ids, many at once, and at which token each place of a text lies.

A tokenizer reads each text of a batch by itself, so a batch gives what the texts give alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from megatrain_cli.data.spelling import find_spelled, spell
from megatrain_cli.errors import RowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100
"""The label of a token that is not learnt."""


@dataclass(frozen=True)
class CutText:
    """A text and places in it.

    Attributes:
        where: For messages: file and line.
        cuts: Places, in characters, ascending.
    """

    where: str
    text: str
    cuts: tuple[int, ...]


@dataclass(frozen=True)
class CutTokens:
    """A text's ids, and at which of them each of its cuts lies."""

    input_ids: list[int]
    places: list[int]


def tokenise_cut(
    texts: Sequence[CutText], tokenizer: "PreTrainedTokenizerBase"
) -> list[CutTokens | RowError]:
    """Token ids of texts, and where their cuts fall.

    The pieces between the cuts are tokenised alone, because that is what a server does with the
    prompt, and checked against the text as a whole:

    - nearly always they spell the text, and every cut falls between two tokens. That holds also
      where an answer that begins with a line break would melt into the prompt's last token: the
      pieces are what the model will see;
    - some tokenizers change what they read (they drop or normalise blanks). Pieces that spell the
      same as the whole are taken;
    - SentencePiece puts a space before each piece, so pieces spell another text. Then the whole
      is taken, provided that the tokens of each prefix are a prefix of its tokens.

    Returns:
        For each text its tokens, or why they cannot be told.
    """
    pieces = [
        [item.text[start:stop] for start, stop in pairwise([0, *item.cuts, len(item.text)])]
        for item in texts
    ]
    flat = iter(tokenise(tokenizer, [piece for parts in pieces for piece in parts]))
    found: list[CutTokens | RowError] = []
    for parts in pieces:
        ids = [next(flat) for _ in parts]
        places = list(accumulate(len(part) for part in ids[:-1]))
        found.append(CutTokens([token for part in ids for token in part], places))
    joined = [item.input_ids for item in found if isinstance(item, CutTokens)]
    spelled = find_spelled(tokenizer, joined, [item.text for item in texts])
    for i, is_spelled in enumerate(spelled):
        if texts[i].cuts and not is_spelled:
            found[i] = _against_whole(texts[i], joined[i], found[i], tokenizer)
    return found


def tokenise(tokenizer: "PreTrainedTokenizerBase", texts: list[str]) -> list[list[int]]:
    """Ids of each text, with nothing added: a template writes its start token itself."""
    if not texts:
        return []
    if _is_plain(tokenizer):
        # What transformers does, less the places and masks of each token that nobody asked for.
        backend = tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = tokenizer.split_special_tokens
        found = backend.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in found]
    # verbose=False: a row longer than the model's context is ours to cut, and no cause to warn.
    ids: list[list[int]] = tokenizer(
        texts,
        add_special_tokens=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )["input_ids"]
    return ids


def _is_plain(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether a tokenizer's class leaves reading a text to the `tokenizers` library."""
    if not tokenizer.is_fast:
        return False
    # Imported here: transformers takes seconds, and this module is wanted without it.
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    names = ("__call__", "_encode_plus", "_batch_encode_plus")
    ours = type(tokenizer)
    return all(
        getattr(ours, name, None) is getattr(PreTrainedTokenizerFast, name, None) for name in names
    )


def _against_whole(
    item: CutText,
    joined: list[int],
    pieces: CutTokens | RowError,
    tokenizer: "PreTrainedTokenizerBase",
) -> CutTokens | RowError:
    """The pieces if they are or spell the whole, the whole if its cuts fall between tokens."""
    whole, *prefixes = tokenise(tokenizer, [item.text, *(item.text[:cut] for cut in item.cuts)])
    if joined == whole or spell(tokenizer, joined) == spell(tokenizer, whole):
        return pieces
    if any(whole[: len(prefix)] != prefix for prefix in prefixes):
        return RowError(
            item.where,
            "the tokens of a prompt change with the answer behind it (the chat "
            "template is not prefix-preserving), so what the model should learn cannot be told.",
        )
    return CutTokens(whole, [len(prefix) for prefix in prefixes])
