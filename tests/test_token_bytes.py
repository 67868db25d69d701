"""Text from each token's bytes: the same as the tokenizer's own, for tokenizers that do nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from helpers import byte_fallback_tokenizer, byte_level_tokenizer, metaspace_tokenizer
from paged_backend.chat.token_bytes import bytes_of_tokens
from paged_backend.engine.detokenizer import Detokenizer


def make_tokenizer() -> Tokenizer:
    """Pieces that begin, end and break off within characters, two special tokens, and two added ones that are not."""
    tokenizer = byte_level_tokenizer(
        "ab", " ab", "\n\n", "é", "日本", b"\xf0\x9f", b"\x99\x82", b"x\xe6\x97", b"\xa9\xff"
    )
    tokenizer.add_special_tokens([AddedToken("<|the end|>", special=True)])
    tokenizer.add_tokens([AddedToken("added 日 text", special=False), AddedToken("plain", special=False)])
    return tokenizer


TOKENIZER = make_tokenizer()
SPECIAL_IDS = frozenset(TOKENIZER.token_to_id(token) for token in ("<end>", "<|the end|>"))
NUM_IDS = TOKENIZER.get_vocab_size() + 3  # some that are no tokens

some_ids = st.lists(st.one_of(st.integers(0, NUM_IDS), st.integers(128, 255), st.integers(256, NUM_IDS)), max_size=40)


@given(token_ids=some_ids, skips_special=st.booleans())
def test_pieces_join_to_the_tokenizers_own_text(token_ids: list[int], skips_special: bool) -> None:
    bytes_of_tokens_ = bytes_of_tokens(TOKENIZER, SPECIAL_IDS)
    assert bytes_of_tokens_ is not None
    bytes_of = bytes_of_tokens_(SPECIAL_IDS if skips_special else frozenset())
    detokenizer = Detokenizer(TOKENIZER.decode, bytes_of=bytes_of)
    pieces = []
    for token_id in token_ids:
        detokenizer.append(token_id)
        pieces.append(detokenizer.take())
    detokenizer.finish()
    pieces.append(detokenizer.take())

    assert "".join(pieces) == TOKENIZER.decode(token_ids, skip_special_tokens=skips_special)


@given(st.text(st.sampled_from("ab éß日本😀🙂👍🏽\u200d\n"), max_size=20))
def test_a_character_comes_with_its_last_byte(text: str) -> None:
    bytes_of_tokens_ = bytes_of_tokens(TOKENIZER, SPECIAL_IDS)
    assert bytes_of_tokens_ is not None
    detokenizer = Detokenizer(TOKENIZER.decode, bytes_of=bytes_of_tokens_(SPECIAL_IDS))
    for character in text:
        *first, last = character.encode()
        for byte in first:
            detokenizer.append(byte)
            assert detokenizer.take() == ""
        detokenizer.append(last)
        assert detokenizer.take() == character


@pytest.mark.parametrize("tokenizer", [byte_fallback_tokenizer("a"), metaspace_tokenizer("a")], ids=["fallback", "T5"])
def test_tokenizers_that_do_more_than_to_join_bytes_are_left_to_themselves(tokenizer: Tokenizer) -> None:
    assert bytes_of_tokens(tokenizer, frozenset()) is None


def test_a_tokenizer_that_leaves_out_other_ids_than_it_is_said_to_is_left_to_itself() -> None:
    assert bytes_of_tokens(TOKENIZER, SPECIAL_IDS | {3}) is None
    assert bytes_of_tokens(TOKENIZER, frozenset()) is None
