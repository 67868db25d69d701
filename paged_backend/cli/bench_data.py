"""What a benchmark asks: made-up prompts, or conversations from a file in ShareGPT's form."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from paged_backend import ConfigError

_WORDS = (
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work number night point home water room "
    "mother area money story fact month lot right study book eye job word business issue side kind head house "
    "service friend father power hour game line end member law car city community name president team minute "
    "idea kid body information back"
)
"""Common enough to be about one token each."""
_CHARACTERS_PER_TOKEN = 4
_USERS = ("human", "user")


class Question(NamedTuple):
    prompt: str
    max_tokens: int


def synthetic(
    num_prompts: int, *, input_len: int, output_len: int, range_ratio: float, prefix_len: int, seed: int
) -> list[Question]:
    """Random words, about `input_len` tokens after a prefix that all share; lengths vary by the share `range_ratio`."""
    rng = random.Random(seed)
    prefix = _words(rng, prefix_len)

    def length(mean: int) -> int:
        return rng.randint(max(1, round(mean * (1 - range_ratio))), max(1, round(mean * (1 + range_ratio))))

    return [
        Question(" ".join([*prefix, *_words(rng, length(input_len))]), length(output_len)) for _ in range(num_prompts)
    ]


def from_file(path: Path, num_prompts: int, *, output_len: int | None, seed: int) -> list[Question]:
    """So many conversations of a file, drawn at random, and drawn again if there are too few: what the user says first,
    with answers as long as those in the file, or of `output_len` tokens.

    The file has ShareGPT's form, `[{"conversations": [{"from": "human", "value": ...}, ...]}]`, or `messages` with
    `role` and `content`; as one list or as lines.
    """
    questions = [question for entry in _entries(path) if (question := _question(entry, output_len)) is not None]
    if not questions:
        raise ConfigError(f"dataset_path={str(path)!r} has no conversation in which a user is answered")
    rng = random.Random(seed)
    rng.shuffle(questions)
    while len(questions) < num_prompts:
        questions.append(rng.choice(questions))
    return questions[:num_prompts]


def _words(rng: random.Random, number: int) -> list[str]:
    return rng.choices(_WORDS.split(), k=number)


def _entries(path: Path) -> Iterator[Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
        if text.lstrip().startswith("["):
            yield from json.loads(text)
        else:
            yield from (json.loads(line) for line in text.split("\n") if line.strip())
    except (ValueError, RecursionError):
        raise ConfigError(
            f"dataset_path={str(path)!r} is no JSON in UTF-8; give a list of conversations, or one conversation a line"
        ) from None


def _question(entry: Any, output_len: int | None) -> Question | None:
    """Of an entry whose first two turns are a user's and an answer, which is what measures compare."""
    if not isinstance(entry, Mapping):
        return None
    turns = entry.get("conversations") or entry.get("messages") or ()
    turns = [turn for turn in turns if isinstance(turn, Mapping) and _role(turn) != "system"][:2]
    if len(turns) < 2 or _role(turns[0]) not in _USERS or not all(_text(turn).strip() for turn in turns):
        return None
    prompt, answer = map(_text, turns)
    return Question(prompt, output_len or max(1, len(answer) // _CHARACTERS_PER_TOKEN))


def _role(turn: Mapping[str, Any]) -> Any:
    return turn.get("from", turn.get("role"))


def _text(turn: Mapping[str, Any]) -> str:
    text = turn.get("value", turn.get("content"))
    return text if isinstance(text, str) else ""
