"""How many characters one token can stand for: a bound on the tokens of a text, without tokenising it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

# Steps that leave at least one character for each they are given, so that no text can become shorter than its tokens
# say. A step that is not here may swallow any number of them.
_KEEPING_NORMALIZERS = {"Prepend": 1, "Lowercase": 1, "NFD": 1, "ByteLevel": 1, "NFC": 4}
"""And how many characters at most become one: compositions of up to four."""
_KEEPING_PRE_TOKENIZERS = ("ByteLevel", "Digits", "Metaspace", "Punctuation", "Split", "UnicodeScripts")


def longest_token(backend: Any) -> int | None:
    """Most characters of a text that one token of a `tokenizers.Tokenizer` stands for; None if there is no such limit:
    unknown words of any length may be one token, and steps before may drop characters."""
    if type(backend.model).__name__ != "BPE":
        return None
    pre_tokenizers = list(_steps(backend.pre_tokenizer, "pretokenizers"))
    names = [step["type"] for step in pre_tokenizers]
    knows_every_byte = backend.model.byte_fallback or "ByteLevel" in names
    is_keeping = all(name in _KEEPING_PRE_TOKENIZERS for name in names)
    if not (knows_every_byte and is_keeping) or any(step.get("behavior") == "Removed" for step in pre_tokenizers):
        return None
    num_joined = 1
    for step in _steps(backend.normalizer, "normalizers"):
        if not (joined := _num_joined(step)):
            return None
        num_joined *= joined
    added = backend.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):  # they swallow the spaces around them
        return None
    tokens = [*backend.get_vocab(with_added_tokens=False), *(token.content for token in added)]
    return num_joined * max(map(len, tokens), default=1)


def _num_joined(step: dict[str, Any]) -> int:
    """How many characters at most a normalizer makes one; 0: any number."""
    if step["type"] == "Replace":
        pattern = step["pattern"].get("String")
        return int(pattern is not None and len(step["content"]) >= len(pattern))
    return _KEEPING_NORMALIZERS.get(step["type"], 0)


def _steps(component: Any, key: str) -> Iterator[dict[str, Any]]:
    """What a part of a tokenizer does, one step after the other."""
    if component is not None:
        yield from _flat(json.loads(component.__getstate__()), key)


def _flat(step: dict[str, Any], key: str) -> Iterator[dict[str, Any]]:
    if step["type"] != "Sequence":
        yield step
        return
    for part in step[key]:
        yield from _flat(part, key)
