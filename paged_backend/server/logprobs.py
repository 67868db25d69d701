"""Log-probabilities in the two forms of OpenAI's API. All numbers are finite: what JSON cannot say becomes -9999."""

from __future__ import annotations

import codecs
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paged_backend import LLM, Logprob

Position = Sequence[tuple[int, Logprob]]
"""The chosen token first, then the best ones."""

_LOWEST = -9999.0
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Spelling:
    """How tokens are written in answers: as text, or as `token_id:5`; and as the bytes that they stand for."""

    def __init__(self, llm: LLM, *, as_ids: bool) -> None:
        self._llm = llm
        self._as_ids = as_ids

    def text(self, token_id: int, token: Logprob) -> str:
        return f"token_id:{token_id}" if self._as_ids else token.decoded_token or ""

    def key(self, token_id: int, token: Logprob) -> str:
        """Like `text`, but parts of characters are told apart, as `bytes:\\xf0\\x9f`."""
        if self._as_ids or _REPLACEMENT not in (token.decoded_token or ""):
            return self.text(token_id, token)
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.bytes(token_id, token))

    def decoded(self, token_id: int) -> str:
        """The token decoded on its own, for those that come without it."""
        return str(self._llm.get_tokenizer().decode([token_id]))

    def bytes(self, token_id: int, token: Logprob) -> bytes:
        """The token's own bytes; those of a part of a character are no text."""
        text = token.decoded_token or ""
        if _REPLACEMENT not in text:
            return text.encode()
        spelled = str(self._llm.get_tokenizer().convert_ids_to_tokens(token_id))
        if match := _BYTE_TOKEN.fullmatch(spelled):
            return bytes.fromhex(match[1])
        byte_of = _byte_of_letter()
        return bytes(byte_of[letter] for letter in spelled) if set(spelled) <= byte_of.keys() else text.encode()


def positions_of(logprobs: Iterable[Mapping[int, Logprob] | None] | None) -> list[Any]:
    """What an output has, as positions; None where there is no probability: at the first token of a prompt."""
    return [None if position is None else list(position.items()) for position in logprobs or ()]


def chat_logprobs(positions: Sequence[Position], num_top: int, spelling: Spelling) -> dict[str, Any]:
    """The form of chats; each alternative is decoded on its own."""
    return {"content": [_chat_position(position, num_top, spelling) for position in positions]}


class CompletionLogprobs:
    """The form of completions. `add` gives a part of the four lists; `text_offset` goes on from part to part."""

    def __init__(self, num_top: int, spelling: Spelling) -> None:
        self._num_top = num_top
        self._spelling = spelling
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_ids: Sequence[int], positions: Sequence[Position | None]) -> dict[str, Any]:
        """A position is None where there is no probability: at the first token of a prompt."""
        part: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, position in zip(token_ids, positions, strict=True):
            part["text_offset"].append(self._offset)
            part["tokens"].append(self._name(token_id, position))
            part["token_logprobs"].append(None if position is None else _finite(position[0][1]))
            part["top_logprobs"].append(None if position is None else self._top(position))
        return part

    def _name(self, token_id: int, position: Position | None) -> str:
        token = Logprob(0.0, 1, self._spelling.decoded(token_id)) if position is None else position[0][1]
        self._offset += len(self._decoder.decode(self._spelling.bytes(token_id, token)))
        return self._spelling.key(token_id, token)

    def _top(self, position: Position) -> dict[str, float]:
        entries = [position[0], *_best(position, self._num_top)]
        return {self._spelling.key(token_id, token): _finite(token) for token_id, token in entries}


def prompt_logprobs_reply(positions: Sequence[Position | None]) -> list[Any]:
    """vLLM's form: one mapping of ids per prompt token, the first null."""
    return [
        None
        if position is None
        else {
            str(token_id): {"logprob": _finite(token), "rank": token.rank, "decoded_token": token.decoded_token}
            for token_id, token in position
        }
        for position in positions
    ]


def _chat_position(position: Position, num_top: int, spelling: Spelling) -> dict[str, Any]:
    def entry(token_id: int, token: Logprob) -> dict[str, Any]:
        return {
            "token": spelling.text(token_id, token),
            "logprob": _finite(token),
            "bytes": list(spelling.bytes(token_id, token)),
        }

    return {**entry(*position[0]), "top_logprobs": [entry(*item) for item in _best(position, num_top)]}


def _best(position: Position, num_top: int) -> list[tuple[int, Logprob]]:
    ranked = sorted(position, key=lambda item: item[1].rank)
    return [item for item in ranked if item[1].rank <= num_top][:num_top]


def _finite(token: Logprob) -> float:
    return max(token.logprob, _LOWEST)


@functools.cache
def _byte_of_letter() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for: printable ones for themselves, the others from
    U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
