"""`/v1/score` and `/v1/rerank`: how well texts fit, in the forms that vLLM, Jina and Cohere share."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from typing import Any

from paged_backend import PairScoreOutput
from paged_backend.server.protocol import RerankRequest, ScoreRequest
from paged_backend.server.serving import Serving


async def score(serving: Serving, body: ScoreRequest) -> dict[str, Any]:
    """One text is compared with each of a list, or two lists side by side; cancelling aborts it."""
    outputs = await _scores(serving, body, body.text_1, body.text_2)
    head = {"id": f"score-{uuid.uuid4().hex}", "object": "list", "created": int(time.time())}
    data = [{"object": "score", "index": index, "score": output.score} for index, output in enumerate(outputs)]
    return {**head, "model": serving.model_name(body.model), "data": data, "usage": _usage(outputs)}


async def rerank(serving: Serving, body: RerankRequest) -> dict[str, Any]:
    """Documents by how well they fit the query, the best first; cancelling aborts it."""
    documents = [document if isinstance(document, str) else document.text for document in body.documents]
    outputs = await _scores(serving, body, body.query, documents)
    best = sorted(range(len(outputs)), key=lambda index: -outputs[index].score)[: body.top_n]
    results = [
        {
            "index": index,
            "document": {"text": documents[index]} if body.return_documents else None,
            "relevance_score": outputs[index].score,
        }
        for index in best
    ]
    return {
        "id": f"rerank-{uuid.uuid4().hex}",
        "model": serving.model_name(body.model),
        "results": results,
        "usage": _usage(outputs),
    }


async def _scores(
    serving: Serving, body: ScoreRequest | RerankRequest, left: str | list[str], right: str | list[str]
) -> list[PairScoreOutput]:
    return await serving.llm.ascore_pairs(
        left,
        right,
        use_activation=body.use_activation,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        priority=body.priority,
        timeout=serving.settings.request_timeout,
        lora_request=serving.lora_request(body.model),
    )


def _usage(outputs: Iterable[PairScoreOutput]) -> dict[str, int]:
    num_tokens = sum(output.num_prompt_tokens for output in outputs)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
