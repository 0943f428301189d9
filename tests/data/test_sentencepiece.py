"""Tokenizers that put a space before a text: pieces of a chat are not tokenised like the whole."""

from typing import Any

import pytest

from megatrain_cli.data.formats import Row
from megatrain_cli.data.template import IGNORED, encode_row
from megatrain_cli.errors import DataError
from tests.data.templates import MISTRAL, ZEPHYR

SPACE = "\u2581"


def make_metaspace(template: str, merges: list[tuple[str, str]]) -> Any:
    """Letters and a space mark, put before every text, as SentencePiece models have it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<s>", "</s>"]
    letters = [SPACE, *"abcdefghijklmnopqrstuvwxyzINST[]/<>|\n"]
    vocab = {t: i for i, t in enumerate([*special, *letters, *(a + b for a, b in merges)])}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    inner.decoder = decoders.Metaspace(prepend_scheme="always", split=False)
    inner.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = template
    return tokenizer


def row(*turns: tuple[str, str]) -> Row:
    return Row("f:1", "messages", tuple({"role": r, "content": c} for r, c in turns))


TURNS = (("user", "u"), ("assistant", "a"), ("user", "v"), ("assistant", "b"))


@pytest.mark.parametrize("template", [MISTRAL, ZEPHYR])
def test_the_whole_is_tokenised_and_cut_between_tokens(template: str) -> None:
    tokenizer = make_metaspace(template, [])
    encoded = encode_row(row(*TURNS), tokenizer, 1000, "truncate", False)
    whole = tokenizer.apply_chat_template(list(row(*TURNS).messages), return_dict=False)
    assert encoded.input_ids == whole
    taught = [label for label in encoded.labels if label != IGNORED]
    lead = [SPACE] if template is MISTRAL else []
    assert tokenizer.convert_ids_to_tokens(taught) == [*lead, "a", "</s>", *lead, "b", "</s>"]


def test_a_prompt_whose_tokens_depend_on_the_answer_is_refused() -> None:
    tokenizer = make_metaspace(ZEPHYR, [("\n", "a")])
    with pytest.raises(DataError, match="the tokens of a prompt change with the answer"):
        encode_row(row(*TURNS), tokenizer, 1000, "truncate", False)
