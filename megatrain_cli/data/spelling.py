"""Tokens as text again, fast where the vocabulary allows it.

The tokens of every chat are checked to spell its text. Most tokenizers are byte-level: their
tokens are bytes, so that spelling is joining, at a third of what decoding takes.
"""

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def find_spelled(
    tokenizer: "PreTrainedTokenizerBase", rows: list[list[int]], texts: list[str]
) -> list[bool]:
    """Whether the ids of each row spell the text in the same place, to the letter."""
    pieces = _bytes_of_tokens(tokenizer, len(tokenizer))
    if pieces is not None:
        return [
            b"".join([pieces[token] for token in ids]) == text.encode()
            for ids, text in zip(rows, texts, strict=True)
        ]
    if tokenizer.is_fast:
        spelled = tokenizer.backend_tokenizer.decode_batch(rows, skip_special_tokens=False)
    else:
        spelled = [spell(tokenizer, ids) for ids in rows]
    return [one == text for one, text in zip(spelled, texts, strict=True)]


def spell(tokenizer: "PreTrainedTokenizerBase", ids: list[int]) -> str:
    """The text of tokens, blanks as they are."""
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


@lru_cache(maxsize=2)
def _bytes_of_tokens(
    tokenizer: "PreTrainedTokenizerBase", num_tokens: int
) -> tuple[bytes, ...] | None:
    """The bytes of each id; None where tokens are not bytes, whatever spelling them takes.

    Args:
        tokenizer: Not changed afterwards, but for tokens that are added.
        num_tokens: That it has by now.
    """
    if not _is_byte_level(tokenizer):
        return None
    added = {id_: token.content for id_, token in tokenizer.added_tokens_decoder.items()}
    byte_of = _byte_of_letter()
    found = [b""] * (1 + max([*added, *tokenizer.get_vocab().values()]))
    for token, id_ in tokenizer.get_vocab().items():
        if id_ in added:
            found[id_] = added[id_].encode()
        elif byte_of.keys() >= set(token):
            found[id_] = bytes([byte_of[letter] for letter in token])
        else:
            return None
    return tuple(found)


def _is_byte_level(tokenizer: "PreTrainedTokenizerBase") -> bool:
    if not tokenizer.is_fast:
        return False
    # Imported here: transformers takes seconds, and this module is wanted without it.
    from tokenizers.decoders import ByteLevel  # noqa: PLC0415

    return isinstance(tokenizer.backend_tokenizer.decoder, ByteLevel)


def _byte_of_letter() -> dict[str, int]:
    """The letter by which byte-level vocabularies write each byte -> the byte.

    Those that print stand for themselves, the others for U+0100 and on, in their order, as in
    GPT-2's `encoder.py`.
    """
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }
