"""What the OpenAPI document says of answers."""

from __future__ import annotations

from typing import Any

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
    max_model_len: int


class ModelList(BaseModel):
    object: str
    data: list[ModelReply]


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
