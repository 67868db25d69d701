"""An engine whose logits are random numbers, and random JSON schemas: what a grammar has to hold against."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Mapping
from typing import Any

import jsonschema
import numpy as np
import torch
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from helpers import FakeRunner, byte_fallback_tokenizer, byte_level_tokenizer
from paged_backend import LLM, Backend
from paged_backend.chat.tokenizer import Tokenizer
from paged_backend.engine.request import Sequence
from paged_backend.sampling.sampler import SampledToken, Sampler

PIECES = (
    *(
        '{"',
        '": ',
        '":',
        '", "',
        ", ",
        '"}',
        '"]',
        "true",
        "null",
        "name",
        "ab",
        " a",
        "  ",
        "\n\n",
        "é",
        "北",
        "\U0001f642",
    ),
    *(b"\xf0\x9f", b"\x99\x82", b"\xe5\x8c"),  # parts of characters
)
POISON = 7
"""A prompt that starts with this id makes its logits NaN."""


class RandomLogits:
    """The real sampler over logits that are a function of the context alone; some tokens are likelier than others."""

    def __init__(self, vocab_size: int, favoured: Mapping[int, float]) -> None:
        self._sampler = Sampler(vocab_size)
        self._bonus = np.zeros(vocab_size, np.float32)
        for token_id, bonus in favoured.items():
            self._bonus[token_id] = bonus

    def sample(self, contexts: list[list[int]], sequences: list[Sequence]) -> list[SampledToken]:
        logits = np.stack([self._logits(context) for context in contexts])
        return self._sampler.sample(torch.from_numpy(logits), sequences)

    def _logits(self, context: list[int]) -> np.ndarray:
        if context[0] == POISON:
            return np.full_like(self._bonus, math.nan)
        numbers = np.random.default_rng(hash(tuple(context)) % 2**63).standard_normal(len(self._bonus), np.float32)
        return 2 * numbers + self._bonus

    def prompt_logprobs(self, logits: Any, token_ids: list[int], num_logprobs: int) -> Any:
        raise NotImplementedError


def make_tokenizer(kind: str = "byte_level") -> Tokenizer:
    if kind == "byte_level":
        backend = byte_level_tokenizer(*PIECES)
    else:
        backend = byte_fallback_tokenizer(*(piece for piece in PIECES if isinstance(piece, str)))
        backend.add_special_tokens([AddedToken("<end>", special=True)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>"))


def make_llm(
    tokenizer: Tokenizer | None = None,
    *,
    num_padding: int = 0,
    num_blocks: int = 4096,
    favoured: str | Iterable[str] = '"}]',
    has_end: bool = True,
    **config: Any,
) -> LLM:
    """`num_padding` logits belong to no token; `favoured` are one-token texts that the model likes."""
    tokenizer = tokenizer or make_tokenizer()
    hf = tokenizer.hf_tokenizer
    vocab_size = len(hf) + num_padding
    runner = FakeRunner(num_blocks=num_blocks, block_size=4, vocab_size=vocab_size)
    bonus = {token_id: 3.0 for text in favoured for token_id in tokenizer.encode(text, add_special_tokens=False)}
    backend = Backend(
        name="random",
        runner=runner,
        sampler=RandomLogits(vocab_size, bonus),
        tokenizer=tokenizer,
        max_model_len=2048,
        eos_token_ids=frozenset([hf.eos_token_id] if has_end else []),
    )
    return LLM.from_backend(backend, **config)


def validate(schema: Any, text: str) -> None:
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))


def make_schema(seed: int) -> dict[str, Any]:
    """A schema of an object with nested objects, arrays, enums, alternatives, references, bounds and patterns."""
    rng = random.Random(seed)
    schema = _object(rng, depth=2)
    schema["$defs"] = {"point": _object(rng, depth=0)}
    return schema


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(["name", "age", "a b", "é", "x", "list", 'q"u', "_"], rng.randint(1, 4))
    required = [name for name in names if rng.random() < 0.7]
    properties = {name: _any(rng, depth) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _any(rng: random.Random, depth: int) -> dict[str, Any]:
    simple: list[dict[str, Any]] = [
        {"type": "string", "maxLength": rng.randint(0, 8)},
        {"type": "string", "pattern": rng.choice(["^[a-z]{2,5}$", r"^\d{3}-\d{4}$", "^(ab|cd)+e$", "^.{2}$"])},
        {"type": "string", "format": rng.choice(["date", "time", "uuid", "ipv4"])},
        {"type": "integer", "minimum": rng.randint(-50, 0), "maximum": rng.randint(1, 3000)},
        {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 12},
        {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100},
        {"type": "number", "minimum": -1.5, "maximum": 2.25},
        {"type": "boolean"},
        {"type": ["integer", "null"], "minimum": 1, "maximum": 9},
        {"enum": ["red", "grün", 3, None, True, {"a": [1]}]},
        {"const": {"k": "v"}},
    ]
    if depth == 0:
        return rng.choice(simple)
    nested: list[dict[str, Any]] = [
        _object(rng, depth - 1),
        {"type": "array", "items": _any(rng, depth - 1), "minItems": 1, "maxItems": rng.randint(1, 3)},
        {"type": "array", "prefixItems": [_any(rng, 0), _any(rng, 0)], "items": False, "minItems": 2},
        {"anyOf": [_any(rng, depth - 1), {"type": "null"}, _any(rng, 0)]},
        {"$ref": "#/$defs/point"},
        {"allOf": [{"$ref": "#/$defs/point"}]},
    ]
    return rng.choice([*nested, rng.choice(simple)])
