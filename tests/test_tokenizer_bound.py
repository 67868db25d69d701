"""A bound on the tokens of a text, known without tokenising it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from helpers import byte_fallback_tokenizer, byte_level_tokenizer, make_llm
from paged_backend import InvalidRequestError, SamplingParams
from paged_backend.chat.token_length import longest_token
from paged_backend.chat.tokenizer import Tokenizer

NFC: Any = normalizers.NFC()
PIECES = ("é", "  ", "    ", "aa", "aaaa", "aaaaaaaa")
MERGES = [("Ã", "©"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ"), ("a", "a"), ("aa", "aa"), ("aaaa", "aaaa")]


def byte_level(change: Callable[[Backend], None] = lambda backend: None) -> Backend:
    backend = byte_level_tokenizer(*PIECES)
    backend.model = models.BPE(backend.get_vocab(with_added_tokens=False), MERGES)
    change(backend)
    return backend


def with_nfc(backend: Backend) -> None:
    backend.normalizer = normalizers.Sequence([NFC, normalizers.Replace("\n", "\\n")])


def with_split(backend: Backend) -> None:
    parts = [pre_tokenizers.Split(Regex(r"\d"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    backend.pre_tokenizer = pre_tokenizers.Sequence(parts)


BOUNDED = {
    "byte_level": byte_level(),
    "composed": byte_level(with_nfc),
    "split": byte_level(with_split),
    "byte_fallback": byte_fallback_tokenizer(" end", "aaaa"),
}
TEXTS = (
    st.text(st.sampled_from("a é\u0301\u0323e\u0300o\n0😀\u1112\u1161\u11ab"), max_size=300) | st.text("a ") | st.text()
)


@pytest.mark.parametrize("kind", BOUNDED)
@given(text=TEXTS)
def test_no_text_has_fewer_tokens(kind: str, text: str) -> None:
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=BOUNDED[kind]))
    assert tokenizer.min_num_tokens(text) <= len(tokenizer.encode(text))


@pytest.mark.parametrize("kind", BOUNDED)
def test_a_long_text_has_many_at_least(kind: str) -> None:
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=BOUNDED[kind]))
    assert tokenizer.min_num_tokens("x" * 100_000) >= 100_000 / 80


def drops_spaces(backend: Backend) -> None:
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()])


def removes(backend: Backend) -> None:
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split("x", "removed"), pre_tokenizers.ByteLevel()])


def strips(backend: Backend) -> None:
    backend.normalizer = normalizers.Strip()


def joins(backend: Backend) -> None:
    backend.normalizer = normalizers.Replace("aa", "a")


def joins_by_pattern(backend: Backend) -> None:
    backend.normalizer = normalizers.Replace(Regex("a+"), "a")


def swallows(backend: Backend) -> None:
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True)])


@pytest.mark.parametrize("change", [drops_spaces, removes, strips, joins, joins_by_pattern, swallows])
def test_nothing_is_known_of_steps_that_drop_characters(change: Callable[[Backend], None]) -> None:
    assert longest_token(byte_level(change)) is None


def test_nothing_is_known_where_unknown_words_are_one_token() -> None:
    words = Backend(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    letters = Backend(models.BPE({"a": 0, "?": 1}, [], unk_token="?", fuse_unk=True))
    letters.decoder = decoders.BPEDecoder()
    assert longest_token(words) is longest_token(letters) is None


def test_what_is_far_too_long_is_refused_without_tokenising_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=byte_level()))
    with make_llm(tokenizer=tokenizer, max_model_len=200) as llm:
        monkeypatch.setattr(tokenizer, "encode", None)
        with pytest.raises(InvalidRequestError, match=r"has 2500 tokens or more, but .* max_model_len=200"):
            llm.generate(["x" * 20_000], SamplingParams(max_tokens=1))
    with make_llm(tokenizer=tokenizer, num_blocks=8) as llm, pytest.raises(InvalidRequestError, match="KV cache holds"):
        llm.generate(["x" * 20_000], SamplingParams(max_tokens=1))
