"""What may be given as `SamplingParams.logits_processors`, and what each of them is called with."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable
from typing import Any

LogitsProcessor = Callable[..., Any]


class Convention(enum.Enum):
    """The arguments of a logits processor. Logits are float32 [V], on the model's device."""

    OUTPUT = enum.auto()
    """(ids generated so far, logits) -> logits"""
    PROMPT_AND_OUTPUT = enum.auto()
    """(ids of the prompt, ids generated so far, logits) -> logits"""
    TRANSFORMERS = enum.auto()
    """(ids of both as a tensor [1, T], logits as [1, V]) -> logits [1, V]"""


def convention_of(processor: LogitsProcessor) -> Convention | None:
    """How the processor wants to be called, or None if in none of these ways.

    By transformers' convention if it is one of its LogitsProcessors or takes `input_ids` and `scores` by these names,
    else by the number of arguments it needs. What does not tell its arguments is called with two.
    """
    if not callable(processor):
        return None
    if any(_is_from_transformers(cls) for cls in type(processor).__mro__):
        return Convention.TRANSFORMERS
    try:
        signature = inspect.signature(processor)
    except (TypeError, ValueError):
        return Convention.OUTPUT
    if list(signature.parameters)[:2] == ["input_ids", "scores"]:
        return Convention.TRANSFORMERS
    for num_arguments, convention in ((2, Convention.OUTPUT), (3, Convention.PROMPT_AND_OUTPUT)):
        if _takes(signature, num_arguments):
            return convention
    return None


def _is_from_transformers(cls: type) -> bool:
    """By name, since transformers takes seconds to import, and who has such an object has imported it."""
    return cls.__name__ == "LogitsProcessor" and cls.__module__.startswith("transformers.")


def _takes(signature: inspect.Signature, num_arguments: int) -> bool:
    try:
        signature.bind(*range(num_arguments))
    except TypeError:
        return False
    return True
