"""What the OpenAPI document says of answers."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    error: ErrorDetail


class ModelReply(BaseModel):
    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None
    """None: not known before the model is loaded for the first time."""


class ModelList(BaseModel):
    object: str
    data: list[ModelReply]


class UsageReply(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: dict[str, list[Any]] | None
    finish_reason: str | None
    stop_reason: str | int | None


class CompletionReply(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageReply


class ToolFunction(BaseModel):
    name: str
    arguments: str


class ToolCallReply(BaseModel):
    id: str
    type: Literal["function"]
    function: ToolFunction


class ChatMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    reasoning: str | None = None
    tool_calls: list[ToolCallReply] | None = None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: dict[str, list[Any]] | None
    finish_reason: str | None
    stop_reason: str | int | None


class ChatReply(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageReply


class ResponseReply(BaseModel):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    incomplete_details: dict[str, str] | None
    usage: dict[str, Any]


class MessageReply(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: dict[str, int]


class CountReply(BaseModel):
    input_tokens: int


class TypedErrorReply(BaseModel):
    type: Literal["error"]
    error: dict[str, str]


class InputUsageReply(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingItem(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingReply(BaseModel):
    object: Literal["list"]
    model: str
    data: list[EmbeddingItem]
    usage: InputUsageReply


class ScoreItem(BaseModel):
    object: Literal["score"]
    index: int
    score: float


class ScoreReply(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreItem]
    usage: InputUsageReply


class RerankItem(BaseModel):
    index: int
    document: dict[str, str] | None
    relevance_score: float


class RerankReply(BaseModel):
    id: str
    model: str
    results: list[RerankItem]
    usage: InputUsageReply


class TokenizeReply(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeReply(BaseModel):
    prompt: str


class StatusReply(BaseModel):
    status: str


class VersionReply(BaseModel):
    version: str


_EVENT = {
    "type": "object",
    "description": "One server-sent event; its data are JSON, or [DONE].",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
OR_EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer; with stream=true, server-sent events.",
        "content": {"text/event-stream": {"schema": _EVENT}},
    }
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorReply, "description": description}
    for status, description in {
        400: "The request cannot be served as asked.",
        401: "The key is missing or unknown.",
        404: "There is no such model or page.",
        413: "The body is too large.",
        422: "Not used: bad fields are a 400.",
        429: "The queue is full; try again later.",
        500: "The server failed.",
        503: "The model is loading, the server drains, or the engine is closed.",
        504: "The request took longer than the server allows.",
    }.items()
}

TYPED_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": TypedErrorReply, "description": error["description"]} for status, error in ERRORS.items()
}
