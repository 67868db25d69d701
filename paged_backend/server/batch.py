"""Lines of OpenAI's batch files, answered as the routes would answer them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Awaitable, Callable, Container
from typing import Any, NamedTuple

from pydantic import ValidationError

from paged_backend import EngineDeadError
from paged_backend.server import chat, completions, embeddings, responses, scoring
from paged_backend.server.errors import ApiError, described, in_words_of, invalid_body
from paged_backend.server.models import Models
from paged_backend.server.protocol import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    ModelBody,
    RerankRequest,
    ScoreRequest,
)
from paged_backend.server.responses_protocol import ResponsesRequest
from paged_backend.server.serving import Serving


class _Route(NamedTuple):
    body: type[ModelBody]
    answer: Callable[[Serving, Any], Awaitable[dict[str, Any]]]


_ROUTES = {
    "/v1/chat/completions": _Route(ChatRequest, chat.answer),
    "/v1/completions": _Route(CompletionRequest, completions.complete),
    "/v1/responses": _Route(ResponsesRequest, responses.respond),
    "/v1/embeddings": _Route(EmbeddingRequest, embeddings.embed),
    "/v1/score": _Route(ScoreRequest, scoring.score),
    "/v1/rerank": _Route(RerankRequest, scoring.rerank),
}


class BatchLine(NamedTuple):
    """One request of a file: well-formed, though its body may still be refused."""

    number: int
    custom_id: str
    url: str
    body: dict[str, Any]


class BadLine(Exception):
    """A line that is no request. `record` is its line in the output."""

    def __init__(self, number: int, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        error = {"code": code, "message": f"line {number}: {message}", "line": number}
        self.record = {"id": _new_id(), "custom_id": custom_id, "response": None, "error": error}


def parse_line(number: int, text: str | None, seen: Container[str]) -> BatchLine:
    """A line as a request; raises BadLine that says what is wrong with it. `seen` has the ids of earlier lines."""
    if text is None:
        raise BadLine(number, "invalid_line", "it is not UTF-8")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise BadLine(number, "invalid_json", "it is no JSON") from None
    if not isinstance(content, dict):
        raise BadLine(number, "invalid_line", "it is no JSON object")
    custom_id = content.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise BadLine(number, "missing_custom_id", "custom_id must be a string that is not empty")
    if custom_id in seen:
        raise BadLine(number, "duplicate_custom_id", f"custom_id {custom_id!r} was used before", custom_id)
    return BatchLine(number, custom_id, *_checked_request(number, custom_id, content))


def _checked_request(number: int, custom_id: str, content: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    method, url, body = content.get("method", "POST"), content.get("url"), content.get("body")
    if method != "POST":
        raise BadLine(number, "invalid_method", f"method {method!r} must be 'POST'", custom_id)
    if not isinstance(url, str) or url not in _ROUTES:
        raise BadLine(number, "invalid_url", f"url {url!r} must be one of {', '.join(_ROUTES)}", custom_id)
    if not isinstance(body, dict):
        raise BadLine(number, "missing_body", "body must be a JSON object", custom_id)
    if body.get("stream"):
        raise BadLine(number, "invalid_stream", "a batch cannot be streamed; leave out stream", custom_id)
    return url, body


async def answer_line(models: Models, line: BatchLine) -> dict[str, Any]:
    """The line's record: what the route answers, refusals too. Raises EngineDeadError, which is no answer."""
    route = _ROUTES[line.url]
    status, body = 200, dict[str, Any]()
    try:
        request = route.body.model_validate(line.body)
        async with models.using(request.model) as serving:
            with in_words_of(request):
                body = await route.answer(serving, request)
    except Exception as error:
        refusal = _refusal(error)
        if refusal.status_code == 503:
            raise EngineDeadError(refusal.message) from error
        status, body = refusal.status_code, refusal.body()
    response = {"status_code": status, "request_id": uuid.uuid4().hex, "body": body}
    return {"id": _new_id(), "custom_id": line.custom_id, "response": response, "error": None}


def has_failed(record: dict[str, Any]) -> bool:
    return record.get("error") is not None or record["response"]["status_code"] != 200


def _refusal(error: Exception) -> ApiError:
    if isinstance(error, ValidationError):
        return invalid_body(error.errors(include_input=False, include_url=False))
    return described(error)


def _new_id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"
