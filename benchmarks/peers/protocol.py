"""The line protocol between `compare.py` and an engine's process: one JSON document a line, on stdin and stdout.

The engine says what it is once it is loaded; then, for each `{"conversations": [...], "num_tokens": 64}`, it answers
all of them at once and says `{"seconds": ..., "num_prompt_tokens": ..., "num_output_tokens": ...}`. It ends with its
stdin. Standard library only: each engine has an environment of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Conversation = list[dict[str, str]]
Counts = tuple[int, int]
Generate = Callable[[list[Conversation], int], Counts]
"""Conversations and how many tokens to answer each with -> prompt tokens and output tokens, of all together. Greedy;
what ends a sequence for others is ignored."""


@dataclasses.dataclass(frozen=True)
class Engine:
    generate: Generate
    settings: dict[str, Any]
    """Whatever it was told that is not its default."""


def serve(
    package: str,
    load: Callable[[Path, str, int, dict[str, Any]], Engine],
    convert: Callable[[Path, str, Path], None] | None = None,
) -> None:
    """The whole life of an engine's process.

    `load(model, precision, threads, options)` makes the engine; `convert(model, precision, converted)` has written
    before, once, what it loads. `package` is the distribution whose version counts.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True, help="what `load`, or `convert`, takes")
    parser.add_argument("--converted", type=Path, help="where `convert` puts the model")
    parser.add_argument("--precision", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--options", type=json.loads, default={})
    arguments = parser.parse_args()

    answers = _stdout_for_answers_only()
    model = arguments.model
    if convert is not None:
        model = _converted(convert, model, arguments.precision, arguments.converted)
    engine = load(model, arguments.precision, arguments.threads, arguments.options)
    version = importlib.metadata.version(package)
    print(json.dumps({"package": package, "version": version, "settings": engine.settings}), file=answers, flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        print(json.dumps(_timed(engine.generate, **task)), file=answers, flush=True)


def _timed(generate: Generate, conversations: list[Conversation], num_tokens: int) -> dict[str, Any]:
    start = time.perf_counter()
    num_prompt_tokens, num_output_tokens = generate(conversations, num_tokens)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "num_prompt_tokens": num_prompt_tokens, "num_output_tokens": num_output_tokens}


def _stdout_for_answers_only() -> Any:
    """The real stdout; what the engine and its children print there from now on goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def _converted(convert: Callable[[Path, str, Path], None], model: Path, precision: str, converted: Path) -> Path:
    """`converted`, which is there whole or not at all."""
    if not converted.exists():
        unfinished = converted.with_name(f"unfinished-{os.getpid()}-{converted.name}")
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        convert(model, precision, unfinished)
        unfinished.rename(converted)
    return converted
