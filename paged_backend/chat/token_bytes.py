"""The bytes of each token, for tokenizers whose text is nothing but these, one after the other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Set
from typing import Any

from tokenizers.decoders import ByteLevel

BytesOf = Callable[[frozenset[int]], Mapping[int, bytes]]
"""Ids that are left out of a text -> the bytes of each id."""


def bytes_of_tokens(backend: Any, special_ids: Set[int]) -> BytesOf | None:
    """None for a tokenizer whose decoder does more than to join bytes, or leaves out other ids than `special_ids`."""
    left_out = {token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special}
    if type(backend.decoder) is not ByteLevel or left_out != special_ids:
        return None
    byte_of = {character: byte for byte, character in enumerate(_alphabet())}
    return functools.cache(lambda dropped: _BytesOf(backend.id_to_token, byte_of, dropped))


class _BytesOf(dict[int, bytes]):
    """Looks each token up once. Ids without a token and those that are dropped have no bytes."""

    def __init__(self, token_of: Callable[[int], str | None], byte_of: Mapping[str, int], dropped: Set[int]) -> None:
        super().__init__(dict.fromkeys(dropped, b""))
        self._token_of = token_of
        self._byte_of = byte_of

    def __missing__(self, token_id: int) -> bytes:
        token = self._token_of(token_id) or ""
        codes = [self._byte_of.get(character) for character in token]
        # Tokens that were added to the vocabulary may be plain text.
        spelled = bytes(code for code in codes if code is not None)
        self[token_id] = result = spelled if len(spelled) == len(codes) else token.encode()
        return result


def _alphabet() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies: itself if it is printable, else one from
    U+0100 on (GPT-2's `bytes_to_unicode`)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
