"""The caller's own logits processors, run row by row; what fails in one fails its row alone."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch

from paged_backend.engine.request import Sequence
from paged_backend.logits_processors import Convention, LogitsProcessor, convention_of


class Processors:
    """The logits processors of one sequence.

    Those of transformers are copied for each sequence, since some of them keep what they know of it; a model that one
    holds is shared. Of the others, those with a method `clone` are cloned, and the rest is shared by all sequences.
    Each is called once per generated token, in their order: what has been sampled is kept through a preemption.
    """

    def __init__(self, given: Iterable[LogitsProcessor]) -> None:
        self._given = given
        self._own: list[tuple[LogitsProcessor, Convention]] | None = None

    def __call__(self, sequence: Sequence, logits: torch.Tensor) -> torch.Tensor:
        """`logits` [V] after all of them; raises whatever one of them raises, TypeError or ValueError for what is no
        float tensor of that shape. Processors may change the tensor that they are given."""
        if self._own is None:
            self._own = [_own(processor) for processor in self._given]
        for processor, convention in self._own:
            logits = _run(processor, convention, sequence, logits)
        return logits


def run_processors(logits: torch.Tensor, rows: Iterable[tuple[int, Sequence, Processors]]) -> dict[int, Exception]:
    """Changes the rows of `logits` [S, V] in place; returns what failed, by row, whose logits are as they were."""
    errors: dict[int, Exception] = {}
    for row, sequence, processors in rows:
        try:
            logits[row] = processors(sequence, logits[row].clone())
        except Exception as error:
            errors[row] = error
    return errors


def _own(processor: LogitsProcessor) -> tuple[LogitsProcessor, Convention]:
    convention = convention_of(processor)
    assert convention is not None, "SamplingParams has checked it"
    if convention is Convention.TRANSFORMERS:
        held = getattr(processor, "__dict__", {}).values()
        models = {id(value): value for value in held if isinstance(value, torch.nn.Module)}
        return copy.deepcopy(processor, models), convention
    clone = getattr(processor, "clone", None)
    return clone() if callable(clone) else processor, convention


def _run(processor: LogitsProcessor, convention: Convention, sequence: Sequence, logits: torch.Tensor) -> torch.Tensor:
    token_ids, num_prompt_tokens = sequence.token_ids, sequence.num_prompt_tokens
    if convention is Convention.TRANSFORMERS:
        input_ids = torch.tensor([token_ids], device=logits.device)
        return _checked(processor, processor(input_ids, logits[None]), logits[None])[0]
    prompt = (token_ids[:num_prompt_tokens],) if convention is Convention.PROMPT_AND_OUTPUT else ()
    return _checked(processor, processor(*prompt, token_ids[num_prompt_tokens:], logits), logits)


def _checked(processor: LogitsProcessor, result: object, given: torch.Tensor) -> torch.Tensor:
    """The result in float32 on the device of what was given; raises if it is not of the same shape."""
    name = getattr(processor, "__name__", type(processor).__name__)
    if not isinstance(result, torch.Tensor):
        raise TypeError(f"the logits processor {name} returned {type(result).__name__}; it must return the logits")
    if result.shape != given.shape or result.is_complex():
        raise ValueError(
            f"the logits processor {name} returned {result.dtype} of shape {tuple(result.shape)}; it must return "
            f"logits of shape {tuple(given.shape)}"
        )
    return result.to(given)
