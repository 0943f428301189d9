"""The quick ways of tokenising and of spelling give what the library's own ways give."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatrain_cli.data import spelling
from megatrain_cli.data.spelling import find_spelled, spell
from megatrain_cli.data.tokenise import tokenise
from tests.data.templates import SPECIAL, make_tokenizer

TOKENIZER = make_tokenizer()
texts = st.lists(
    st.one_of(
        st.sampled_from([*SPECIAL, "\n", "  ", "é", "e\u0301", "\U0001f600", "\ufffd", "\u0120"]),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    ),
    max_size=6,
).map("".join)


def ids_of(tokenizer: Any, text: str) -> list[int]:
    found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return found


@given(st.lists(texts, max_size=4))
def test_ids_are_those_of_transformers(some: list[str]) -> None:
    assert tokenise(TOKENIZER, some) == [ids_of(TOKENIZER, text) for text in some]


def test_nothing_is_cut_or_padded_whatever_the_tokenizers_file_says() -> None:
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=9)
    assert tokenise(tokenizer, ["long enough"]) == [ids_of(TOKENIZER, "long enough")]
    tokenizer.split_special_tokens = True
    assert len(tokenise(tokenizer, ["<|im_end|>"])[0]) == len("<|im_end|>")
    tokenizer.split_special_tokens = False
    assert len(tokenise(tokenizer, ["<|im_end|>"])[0]) == 1


def test_a_tokenizer_that_reads_in_its_own_way_is_asked_in_that_way() -> None:
    class Lower(PreTrainedTokenizerFast):
        def __call__(self, text: list[str], **more: Any) -> Any:
            return super().__call__([one.lower() for one in text], **more)

    make: Any = Lower
    tokenizer = make(tokenizer_object=TOKENIZER.backend_tokenizer)
    assert tokenise(tokenizer, ["ABC"]) == [ids_of(TOKENIZER, "abc")]


@given(st.lists(texts, min_size=1, max_size=4), st.data())
def test_tokens_that_are_bytes_are_joined_to_what_decoding_gives(
    some: list[str], data: st.DataObject
) -> None:
    rows = [ids_of(TOKENIZER, text) for text in some]
    assert spelling._bytes_of_tokens(TOKENIZER, len(TOKENIZER)) is not None
    assert find_spelled(TOKENIZER, rows, some) == [True] * len(some)
    other = data.draw(texts)
    wanted = [spell(TOKENIZER, ids) == other for ids in rows]
    assert find_spelled(TOKENIZER, rows, [other] * len(rows)) == wanted


def test_a_token_that_is_added_later_is_spelled_too() -> None:
    tokenizer = make_tokenizer()
    assert find_spelled(tokenizer, [ids_of(tokenizer, "a")], ["a"]) == [True]
    tokenizer.add_tokens(["<é new>"])
    ids = ids_of(tokenizer, "a<é new>b")
    assert len(ids) == 3
    assert find_spelled(tokenizer, [ids, ids], ["a<é new>b", "a<é>b"]) == [True, False]


def test_a_normaliser_that_changes_the_text_is_seen() -> None:
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    text = "Abc"
    assert find_spelled(tokenizer, tokenise(tokenizer, [text]), [text]) == [False]


@pytest.mark.parametrize("decoder", [decoders.ByteLevel(), decoders.WordPiece()])
def test_a_vocabulary_of_words_is_decoded(decoder: Any) -> None:
    """Also where its decoder is one of bytes: a blank in a token is no letter of those."""
    vocab = {"[UNK]": 0, "hello": 1, "world": 2, "a b": 3}
    bare = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    bare.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    bare.decoder = decoder
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=bare, unk_token="[UNK]")
    assert spelling._bytes_of_tokens(tokenizer, len(tokenizer)) is None
    rows = tokenise(tokenizer, ["hello world", "hello there"])
    wanted = [spell(tokenizer, ids) == "hello world" for ids in rows]
    assert find_spelled(tokenizer, rows, ["hello world"] * 2) == wanted
