"""`/v1/embeddings`, and what follows from vectors: `/v1/score` and `/v1/rerank`, in vLLM's form."""

from __future__ import annotations

import base64
import math
import struct
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from paged_backend import EmbeddingRequestOutput
from paged_backend.server.protocol import EmbeddingRequest, RerankRequest, ScoreRequest, prompts_of
from paged_backend.server.serving import Serving


async def embed(serving: Serving, body: EmbeddingRequest) -> dict[str, Any]:
    """A vector per input; cancelling aborts it."""
    outputs = await _outputs(
        serving,
        body,
        prompts_of(body.input),
        dimensions=body.dimensions,
        cache_salt=body.cache_salt,
    )
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(_vector(output), body.encoding_format)}
        for index, output in enumerate(outputs)
    ]
    return {"object": "list", "model": serving.model_name(body.model), "data": data, "usage": _usage(outputs)}


async def score(serving: Serving, body: ScoreRequest) -> dict[str, Any]:
    """How alike texts are: the cosine of the angle between their vectors. One text is compared with each of a list."""
    right = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    left = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    outputs = await _outputs(serving, body, [*left, *right])
    lefts, rights = outputs[: len(left)], outputs[len(left) :]
    pairs = zip(lefts * len(rights) if len(lefts) == 1 else lefts, rights, strict=True)
    data = [
        {"object": "score", "index": index, "score": _cosine(_vector(one), _vector(other))}
        for index, (one, other) in enumerate(pairs)
    ]
    head = {"id": f"score-{uuid.uuid4().hex}", "object": "list", "created": int(time.time())}
    return {**head, "model": serving.model_name(body.model), "data": data, "usage": _usage(outputs)}


async def rerank(serving: Serving, body: RerankRequest) -> dict[str, Any]:
    """Documents by how alike they are to the query, the best first."""
    query, *documents = await _outputs(serving, body, [body.query, *body.documents])
    scores = [_cosine(_vector(query), _vector(document)) for document in documents]
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
    results = [
        {
            "index": index,
            "document": {"text": body.documents[index]} if body.return_documents else None,
            "relevance_score": scores[index],
        }
        for index in best
    ]
    return {
        "id": f"rerank-{uuid.uuid4().hex}",
        "model": serving.model_name(body.model),
        "results": results,
        "usage": _usage([query, *documents]),
    }


async def _outputs(
    serving: Serving,
    body: EmbeddingRequest | ScoreRequest | RerankRequest,
    prompts: Sequence[str | list[int]],
    **options: Any,
) -> list[EmbeddingRequestOutput]:
    return await serving.llm.aembed(
        prompts,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        priority=body.priority,
        timeout=serving.settings.request_timeout,
        **options,
    )


def _vector(output: EmbeddingRequestOutput) -> list[float]:
    return output.outputs.embedding


def _encoded(vector: list[float], encoding: str) -> list[float] | str:
    """As numbers, or as the base64 of little-endian 32-bit floats."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode() if encoding == "base64" else vector


def _cosine(one: list[float], other: list[float]) -> float:
    lengths = math.hypot(*one) * math.hypot(*other)
    return math.fsum(a * b for a, b in zip(one, other, strict=True)) / lengths if lengths else 0.0


def _usage(outputs: Iterable[EmbeddingRequestOutput]) -> dict[str, int]:
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
