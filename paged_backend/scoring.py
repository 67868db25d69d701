"""Prompts and their continuations: how they are cut into tokens, and what is made of their log-probabilities."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, NamedTuple

from paged_backend.chat.tokenizer import Tokenizer
from paged_backend.engine.request import Request
from paged_backend.errors import InvalidRequestError
from paged_backend.outputs import RequestOutput, ScoreOutput


class Pair(NamedTuple):
    """What is computed: the prompt's tokens, then those that are scored."""

    prompt: list[int]
    continuation: list[int]


class Scoring(NamedTuple):
    """The requests of one call, in order, the pair of each, and how many pairs each prompt has."""

    requests: list[Request]
    pairs: list[Pair]
    nums: list[int]


def continuations_of(prompts: Any, continuations: Any, *, is_one: bool) -> list[list[Any]]:
    """The continuations of each prompt. One prompt has one or a list of them, several have one or a list for each."""
    if is_one:
        return [_as_list(continuations)]
    if isinstance(continuations, (str, bytes)) or not isinstance(continuations, Sequence):
        message = f"continuations={continuations!r} must be a list with one entry per prompt"
        raise InvalidRequestError(message, field="continuations")
    if len(continuations) != len(prompts):
        raise InvalidRequestError(
            f"{len(continuations)} entries of continuations for {len(prompts)} prompts; give one (or a list) for each",
            field="continuations",
        )
    return [_as_list(entry) for entry in continuations]


def pair_of(prompt: str | list[int], continuation: Any, tokenizer: Callable[[], Tokenizer]) -> Pair:
    """The two as tokens.

    Two texts are tokenised together, and what goes beyond the tokens of the prompt alone is the continuation; spaces at
    the prompt's end are counted to the continuation, since most vocabularies write them at the start of a word. This is
    how lm-eval does it. If nothing goes beyond (the whole text has no more tokens than the prompt), the continuation is
    tokenised on its own, as it is if one of the two is given as ids. An empty prompt becomes the BOS token or, for
    vocabularies without one, the EOS token.
    """
    if isinstance(prompt, str) and isinstance(continuation, str):
        pair = _text_pair(prompt, continuation, tokenizer())
    else:
        before = prompt if isinstance(prompt, list) else _encode_open(prompt, tokenizer())
        pair = Pair(before, _ids(continuation, tokenizer))
    if not pair.continuation:
        message = f"the continuation {continuation!r} is empty; it must have at least one token"
        raise InvalidRequestError(message, field="continuations")
    return pair if pair.prompt else pair._replace(prompt=[_first_token(tokenizer())])


def scores_of(scoring: Scoring, outputs: list[RequestOutput]) -> list[list[ScoreOutput]]:
    """What the outputs of its requests say; per prompt, in order."""
    scores = itertools.starmap(score_of, zip(scoring.pairs, outputs, strict=True))
    return [list(itertools.islice(scores, num)) for num in scoring.nums]


def score_of(pair: Pair, output: RequestOutput) -> ScoreOutput:
    """What the log-probabilities of the request for `pair` say."""
    assert output.prompt_logprobs is not None
    entries = output.prompt_logprobs[len(pair.prompt) :]
    named = [entry[token_id] for token_id, entry in zip(pair.continuation, entries, strict=True) if entry is not None]
    return ScoreOutput(
        token_ids=tuple(pair.continuation),
        logprobs=tuple(item.logprob for item in named),
        is_greedy=all(item.rank == 1 for item in named),
        num_prompt_tokens=len(pair.prompt),
        num_cached_tokens=output.num_cached_tokens,
    )


def _as_list(continuations: Any) -> list[Any]:
    """A text, or ids, is one continuation."""
    if isinstance(continuations, str):
        return [continuations]
    if hasattr(continuations, "tolist"):
        continuations = continuations.tolist()
    if not isinstance(continuations, Sequence) or isinstance(continuations, bytes) or not continuations:
        message = f"continuations={continuations!r} must be text or token ids, or a list of these"
        raise InvalidRequestError(message, field="continuations")
    return [continuations] if isinstance(continuations[0], Integral) else list(continuations)


def _text_pair(prompt: str, continuation: str, tokenizer: Tokenizer) -> Pair:
    text = prompt.rstrip()
    continuation = prompt[len(text) :] + continuation
    before = _encode_open(text, tokenizer)
    beyond = _encode_open(text + continuation, tokenizer)[len(before) :]
    return Pair(before, beyond or tokenizer.encode(continuation, add_special_tokens=False))


def _encode_open(text: str, tokenizer: Tokenizer) -> list[int]:
    """Without what some tokenizers put after a text (EOS), since this text goes on."""
    token_ids = tokenizer.encode(text)
    return token_ids[: max(0, len(token_ids) - tokenizer.num_final_special_tokens)]


def _ids(continuation: Any, tokenizer: Callable[[], Tokenizer]) -> list[int]:
    if hasattr(continuation, "tolist"):
        continuation = continuation.tolist()
    if isinstance(continuation, Sequence) and not isinstance(continuation, (str, bytes)):
        return [int(item) if isinstance(item, Integral) else item for item in continuation]
    return tokenizer().encode(continuation, add_special_tokens=False)


def _first_token(tokenizer: Tokenizer) -> int:
    hf_tokenizer = tokenizer.hf_tokenizer
    for token_id in (hf_tokenizer.bos_token_id, hf_tokenizer.eos_token_id):
        if token_id is not None:
            return int(token_id)
    raise InvalidRequestError(
        "the prompt is empty, and the tokenizer has neither a BOS nor an EOS token that could stand before the "
        "continuation; give a prompt",
        field="prompt",
    )
