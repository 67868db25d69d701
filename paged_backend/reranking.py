"""Pairs of texts and how well they fit: by a head that reads both, or by the angle between their vectors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from paged_backend.engine.request import Request
from paged_backend.errors import EngineDeadError, InvalidRequestError
from paged_backend.outputs import ClassificationOutput, PairScoreOutput, RerankOutput
from paged_backend.pooling_params import ClassificationSupport


class PairScoring(NamedTuple):
    """The requests of one call, and which of them each pair needs: one that holds both texts, or one for each."""

    requests: list[Request]
    pairs: Sequence[tuple[int, ...]]
    classification: ClassificationSupport | None
    """None: scores are cosines."""
    use_activation: bool

    def outputs(self) -> list[PairScoreOutput]:
        """Once all requests have finished."""
        counted: set[int] = set()
        outputs = []
        for pair in self.pairs:
            new = set(pair) - counted
            counted |= new
            num_tokens = sum(len(self.requests[index].prompt_token_ids) for index in new)
            outputs.append(
                PairScoreOutput(self._score([vector_of(self.requests[index]) for index in pair]), num_tokens)
            )
        return outputs

    def _score(self, vectors: list[list[float]]) -> float:
        if self.classification is None:
            return _cosine(*vectors)
        ((value,),) = vectors
        return activated([value], self.classification.activation)[0] if self.use_activation else value


def pairs_of(first: Any, second: Any) -> list[tuple[str, str]]:
    """One text with each of a list, or two lists side by side."""
    left, right = _texts("text_1", first), _texts("text_2", second)
    if isinstance(first, str):
        left = left * len(right)
    if len(left) != len(right):
        raise InvalidRequestError(
            f"{len(left)} texts in text_1 for {len(right)} in text_2; give one for all, or one for each", field="text_2"
        )
    return list(zip(left, right, strict=True))


def ranked(documents: Sequence[str], scores: Sequence[PairScoreOutput], top_n: int | None) -> list[RerankOutput]:
    """The documents, best first; those with the same score in their order."""
    if top_n is not None and (isinstance(top_n, bool) or not isinstance(top_n, int) or top_n < 1):
        raise InvalidRequestError(f"top_n={top_n!r} must be an integer ≥ 1, or None for all", field="top_n")
    best = sorted(range(len(scores)), key=lambda index: -scores[index].score)[:top_n]
    return [RerankOutput(index, documents[index], scores[index].score) for index in best]


def classified(request: Request, support: ClassificationSupport, *, use_activation: bool) -> ClassificationOutput:
    values = vector_of(request)
    probs = activated(values, support.activation) if use_activation else values
    best = max(range(len(probs)), key=probs.__getitem__)
    return ClassificationOutput(
        label=support.labels[best], probs=probs, num_prompt_tokens=len(request.prompt_token_ids)
    )


def activated(values: list[float], activation: str) -> list[float]:
    if activation == "sigmoid":
        return [_sigmoid(value) for value in values]
    if activation == "softmax":
        powers = [math.exp(value - max(values)) for value in values]
        return [power / math.fsum(powers) for power in powers]
    return values


def vector_of(request: Request) -> list[float]:
    if request.embedding is None:
        raise EngineDeadError(f"request {request.request_id} was aborted")
    return request.embedding


def _texts(name: str, value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not texts or not all(isinstance(text, str) for text in texts):
        raise InvalidRequestError(f"{name}={value!r} must be a text, or a list of texts", field=name)
    return list(texts)


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value >= 0 else 1 - 1 / (1 + math.exp(value))


def _cosine(one: list[float], other: list[float]) -> float:
    lengths = math.hypot(*one) * math.hypot(*other)
    cosine = math.fsum(a * b for a, b in zip(one, other, strict=True)) / lengths if lengths else 0.0
    return max(-1.0, min(cosine, 1.0))  # which rounding may have led beyond
