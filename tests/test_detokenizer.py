"""Ids to text, piece by piece: the pieces are the text, whole characters only, and no part of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from helpers import byte_fallback_tokenizer, byte_level_tokenizer, metaspace_tokenizer
from paged_backend import EngineConfig
from paged_backend.engine.detokenizer import Detokenizer
from paged_backend.engine.incremental_text import Decode
from paged_backend.model.demo import demo_folder

BROKEN = "\ufffd"
SMILE = "\U0001f642"

# Pieces that begin, end and break off within characters.
BYTE_LEVEL = byte_level_tokenizer(
    *("ab", " ab", "abc", "ba", "  ", "\n\n", "é", "日本", " " + SMILE),
    *(b"\xf0\x9f", b"\x99\x82", b"x\xe6\x97", b"\xa5y\xc3", b"\xa9\xff"),
)
BYTE_FALLBACK = byte_fallback_tokenizer("a", " a", "b", " b", " ", "é", " é", BROKEN)
METASPACE = metaspace_tokenizer(" ", " a", "a", "b", " b", "é", " 日", BROKEN)

texts = st.text(st.sampled_from("ab éß日本😀🙂👍🏽\u200d\n"), max_size=30)


class Pieces(NamedTuple):
    pieces: list[str]
    """What was given out after each token, and at the end."""
    stop: str | None
    num_tokens: int
    """How many tokens were taken until the stop string."""

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def detokenize(decode: Decode, token_ids: Sequence[int], **options: object) -> Pieces:
    detokenizer = Detokenizer(decode, **options)  # type: ignore[arg-type]
    pieces: list[str] = []
    for index, token_id in enumerate(token_ids):
        stop = detokenizer.append(token_id)
        pieces.append(detokenizer.take())
        if stop is not None:
            detokenizer.finish()
            return Pieces([*pieces, detokenizer.take()], stop, index + 1)
    detokenizer.finish()
    pieces.append(detokenizer.take())
    assert "".join(pieces) == detokenizer.text
    return Pieces(pieces, None, len(token_ids))


def byte_fallback_ids(text: str) -> list[int]:
    """The ids of a text, each character that has no piece as its bytes."""
    ids = []
    for character in text:
        token_id = BYTE_FALLBACK.token_to_id(character.replace(" ", "▁"))
        ids += list(character.encode()) if token_id is None else [token_id]
    return ids


@given(st.lists(st.one_of(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), st.integers(128, 255)), max_size=60))
def test_pieces_join_to_the_text_for_any_ids_of_a_byte_level_tokenizer(token_ids: list[int]) -> None:
    assert detokenize(BYTE_LEVEL.decode, token_ids).text == BYTE_LEVEL.decode(token_ids)


@given(text=texts, cut=st.integers(0, 3))
def test_pieces_join_to_the_text_for_a_tokenizer_that_falls_back_on_bytes(text: str, cut: int) -> None:
    token_ids = byte_fallback_ids(text)
    token_ids = token_ids[: len(token_ids) - cut]
    result = detokenize(BYTE_FALLBACK.decode, token_ids)

    # Such a tokenizer decodes a whole run of bytes as broken if its last character is: what was given out stays good.
    assert result.text.startswith(text.removeprefix(" ")[: len(result.text.rstrip(BROKEN))])
    if cut == 0:
        assert result.text == BYTE_FALLBACK.decode(token_ids) == text.removeprefix(" ")


@given(st.lists(st.integers(0, METASPACE.get_vocab_size() - 1), max_size=60))
def test_pieces_join_to_the_text_for_a_metaspace_tokenizer(token_ids: list[int]) -> None:
    assert detokenize(METASPACE.decode, token_ids).text == METASPACE.decode(token_ids)


@given(st.lists(st.integers(0, 255), max_size=60))
def test_no_bytes_are_lost_or_held_for_long_with_a_tokenizer_that_falls_back_on_bytes(token_ids: list[int]) -> None:
    detokenizer = Detokenizer(BYTE_FALLBACK.decode)
    num_given = 0
    for index, token_id in enumerate(token_ids):
        detokenizer.append(token_id)
        num_given += len(detokenizer.take())
        assert num_given >= (index - 2) / 4, "each four bytes make a character at least"


@pytest.mark.parametrize(
    "decode, encode",
    [(BYTE_LEVEL.decode, lambda text: list(text.encode())), (BYTE_FALLBACK.decode, byte_fallback_ids)],
    ids=["byte level", "byte fallback"],
)
@given(text=texts)
def test_a_character_is_given_out_with_its_last_byte_and_never_in_parts(
    decode: Decode, encode: Callable[[str], list[int]], text: str
) -> None:
    for text_so_far, ids in ((text[:end], encode(text[:end])) for end in range(1, len(text) + 1)):
        pieces = detokenize(decode, ids).pieces
        assert "".join(pieces[:-1]) == text_so_far.removeprefix("" if decode == BYTE_LEVEL.decode else " ")
        assert BROKEN not in "".join(pieces)


def test_a_long_text_is_not_decoded_from_its_start_with_each_token() -> None:
    sizes: list[int] = []

    def decode(token_ids: list[int]) -> str:
        sizes.append(len(token_ids))
        return str(BYTE_LEVEL.decode(token_ids))

    text = "日本 ab 🙂é" * 50
    assert detokenize(decode, list(text.encode())).text == text
    assert max(sizes) < 40


def first_stop(text_after: Sequence[str], stop: Sequence[str], min_tokens: int) -> tuple[int, int, str] | None:
    """By definition: the stop string complete first in the full text, if that is after the first `min_tokens` tokens;
    of several, the longest. Its end, its start, and itself."""
    text, protected = (
        text_after[-1],
        len(text_after[min_tokens]) if min_tokens < len(text_after) else len(text_after[-1]),
    )
    matches = [
        (end, end - len(one), one)
        for end in range(protected + 1, len(text) + 1)
        for one in stop
        if text[:end].endswith(one)
    ]
    return min(matches, default=None)


@given(
    token_ids=st.lists(st.sampled_from([*b"abc ", *range(256, 261)]), min_size=1, max_size=30),
    stop=st.lists(st.text("abc ", min_size=1, max_size=5), max_size=4),
    include=st.booleans(),
    min_tokens=st.integers(0, 6),
)
def test_the_text_ends_at_the_stop_string_that_is_complete_first(
    token_ids: list[int], stop: list[str], include: bool, min_tokens: int
) -> None:
    text_after = [BYTE_LEVEL.decode(token_ids[:end]) for end in range(len(token_ids) + 1)]
    result = detokenize(
        BYTE_LEVEL.decode, token_ids, stop=stop, include_stop_str_in_output=include, min_tokens=min_tokens
    )

    match = first_stop(text_after, stop, min_tokens)
    if match is None:
        assert (result.text, result.stop) == (text_after[-1], None)
        return
    end, start, found = match
    assert (result.text, result.stop) == (text_after[-1][: end if include else start], found)
    assert len(text_after[result.num_tokens - 1]) < end <= len(text_after[result.num_tokens])


@given(
    token_ids=st.lists(st.sampled_from([*b"abc ", *range(256, 261)]), max_size=30),
    stop=st.lists(st.text("abc ", min_size=1, max_size=5), max_size=4),
)
def test_nothing_is_held_back_but_what_may_become_a_stop_string(token_ids: list[int], stop: list[str]) -> None:
    detokenizer = Detokenizer(BYTE_LEVEL.decode, stop=stop)
    given_out = ""
    for end, token_id in enumerate(token_ids, start=1):
        if detokenizer.append(token_id) is not None:
            return
        given_out += detokenizer.take()
        held = BYTE_LEVEL.decode(token_ids[:end]).removeprefix(given_out)
        assert not held or any(one.startswith(held) for one in stop)


@pytest.mark.parametrize(
    "text, stop, expected",
    [
        ("aaab!", ["aab"], "a"),
        ("beta gamma", ["beta gamma"], ""),
        ("DEFGHIK", ["DEFGHIJ"], "DEFGHIK"),
        ("so abcd", ["abc", "abcd"], "so "),
        ("so abxd", ["abc", "abcd"], "so abxd"),
        ("so ab", ["abc"], "so ab"),
        ("日本🙂!", ["🙂"], "日本"),
    ],
)
def test_stop_strings_spread_over_tokens(text: str, stop: list[str], expected: str) -> None:
    result = detokenize(BYTE_LEVEL.decode, list(text.encode()), stop=stop)

    assert result.text == expected
    assert (result.stop is None) == (expected == text)


def test_a_stop_string_within_the_first_tokens_never_counts_but_one_that_ends_later_does() -> None:
    def ended_at(text: str, **options: object) -> int | None:
        result = detokenize(BYTE_LEVEL.decode, list(text.encode()), **options)
        return result.num_tokens if result.stop else None

    assert ended_at("a\nbcdef", stop=["\n"], min_tokens=4) is None
    assert ended_at("a\nbcd\nf", stop=["\n"], min_tokens=4) == 6
    assert ended_at("abcXYZ", stop=["cX"], min_tokens=3) == 4
    assert ended_at("abcXYZ", stop=["cX"], min_tokens=4) is None


def test_a_metaspace_tokenizer_keeps_the_spaces_between_words() -> None:
    blank, word = METASPACE.token_to_id("▁"), METASPACE.token_to_id("▁a")

    assert detokenize(METASPACE.decode, [blank, word, word]).pieces == ["", " a", " a", ""]


def test_a_broken_character_at_the_end_becomes_text_when_nothing_more_comes() -> None:
    assert detokenize(BYTE_LEVEL.decode, list("a🙂".encode())[:-1]).pieces == ["a", "", "", "", BROKEN]


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    """The demo model's tokenizer."""
    folder = demo_folder(EngineConfig().cache_folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.mark.parametrize(
    "token_ids, options, expected",
    [
        ([7042], {"stop": ["Pari"]}, [" "]),
        ([7042], {"stop": [" Par"]}, [""]),
        ([7042], {"stop": ["ris"]}, [" Pa"]),
        ([7042], {"stop": [" "]}, [""]),
        ([7042], {"stop": ["ris"], "include_stop_str_in_output": True}, [" Paris"]),
        ([7042], {"stop": ["Pa"], "include_stop_str_in_output": True}, [" Pa"]),
        ([17859], {"stop": ["}"]}, [""]),
        ([1116], {"stop": ["\n"]}, [""]),
        ([1116], {"stop": ["\n"], "include_stop_str_in_output": True}, ["\n"]),
        ([33203, 23960, 57, 58], {"stop": ["DEFGHIJ"]}, ["", "", "", ""]),
        ([33203, 23960, 57, 59], {"stop": ["DEFGHIJ"]}, ["", "", "", "DEFGHIK"]),
        ([10813, 38887, 17], {}, ["", SMILE, "!"]),
        ([143, 233, 216], {}, ["", "ď", " "]),
        ([47526], {}, [" " + SMILE]),
    ],
)
def test_texts_of_the_demo_model(
    smollm2: Tokenizer, token_ids: list[int], options: dict[str, object], expected: list[str]
) -> None:
    assert detokenize(smollm2.decode, token_ids, **options).pieces == [*expected, ""]


@given(text=texts)
def test_texts_of_the_demo_model_join(smollm2: Tokenizer, text: str) -> None:
    token_ids = smollm2.encode(text).ids

    assert detokenize(smollm2.decode, token_ids).text == text
