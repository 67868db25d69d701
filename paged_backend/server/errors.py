"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from paged_backend import (
    EngineDeadError,
    EngineError,
    GrammarError,
    InvalidRequestError,
    OverloadedError,
    RequestTimeoutError,
)
from paged_backend.server.protocol import ModelBody

logger = logging.getLogger(__name__)

RETRY_SECONDS = 1
_PIECE = 4096
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_ANTHROPIC_PATH = re.compile(r"/v1/messages(?:/|$)")
_TYPE_OF_STATUS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 504: "timeout_error"}
_FOR_PROGRAMS = "; make a new LLM"
"""What clients cannot do."""
_TOO_DEEP = "is nested too deeply; send fewer levels"


class ApiError(HTTPException):
    """What a client is told: one sentence, the field it is about, and a code that programs can look at."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry: bool = False
    ) -> None:
        super().__init__(status, message, {"Retry-After": str(RETRY_SECONDS)} if retry else None)
        self.message, self.param, self.code = message, param, code

    def body(self) -> dict[str, Any]:
        kind = _TYPE_OF_STATUS.get(
            self.status_code, "invalid_request_error" if self.status_code < 500 else "server_error"
        )
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def typed_body(self) -> dict[str, Any]:
        """The same in Anthropic's shape."""
        kind = "overloaded_error" if self.status_code == 503 else self.body()["error"]["type"]
        error: dict[str, Any] = {"type": "api_error" if kind == "server_error" else kind, "message": self.message}
        if self.param == "thread":  # so that clients send the whole conversation instead
            error["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        return {"type": "error", "error": error}

    def response(self, path: str) -> Response:
        """The answer to a request for `path`, which says whose clients read it."""
        body = self.typed_body() if _ANTHROPIC_PATH.match(path) else self.body()
        return JSONReply(body, self.status_code, self.headers)


class JSONReply(JSONResponse):
    """Strict JSON: no NaN, and a lone surrogate, which a client may have sent, becomes a question mark. Bytes are JSON
    already."""

    def render(self, content: Any) -> bytes:
        return content if isinstance(content, bytes) else encode_json(content)


def encode_json(content: Any) -> bytes:
    return _ENCODER.encode(content).encode("utf-8", "replace")


def encode_in_pieces(content: Mapping[str, Any]) -> bytes:
    """The same of an object with long lists, for threads: it gives way to others every few thousand items."""
    parts = (encode_json(key) + b":" + _encode_value(value) for key, value in content.items())
    return b"{" + b",".join(parts) + b"}"


def _encode_value(value: Any) -> bytes:
    if not isinstance(value, list) or not value:
        return encode_json(value)
    pieces = (value[start : start + _PIECE] for start in range(0, len(value), _PIECE))
    return b"[" + b",".join(encode_json(piece)[1:-1] for piece in pieces) + b"]"


def described(error: Exception) -> ApiError:
    """What a client is told of an error; of one that nobody foresaw, that there was one."""
    match error:
        case ApiError():
            return error
        case InvalidRequestError():
            return _refusal(error, error.field)
        case OverloadedError():
            return ApiError(429, str(error), code="queue_full", retry=True)
        case RequestTimeoutError():
            return ApiError(504, str(error), code="request_timeout")
        case EngineDeadError():
            return ApiError(503, str(error).removesuffix(_FOR_PROGRAMS), code="engine_dead")
        case EngineError(__cause__=GrammarError()):
            message = "the structure asked for is too complex to be followed any further; ask for a simpler one"
            return ApiError(400, message, code="grammar_too_complex")
        case EngineError():
            return ApiError(500, str(error), code="engine_error")
        case RecursionError():
            return ApiError(400, f"the body {_TOO_DEEP}", code="invalid_value")
        case HTTPException():
            return ApiError(error.status_code, str(error.detail))
    logger.error("a request failed", exc_info=error)
    return ApiError(500, "the server made a mistake; its log has the details", code="internal_error")


@contextlib.contextmanager
def in_words_of(body: ModelBody) -> Iterator[None]:
    """What the engine refuses meanwhile is told by the names of the fields that this client sent."""
    try:
        yield
    except InvalidRequestError as error:
        raise _refusal(error, body.source_of(error.field)) from error


def _refusal(error: InvalidRequestError, param: str | None) -> ApiError:
    """The message names the field as the client does."""
    message = str(error)
    if param is not None and error.field is not None:
        message = message.replace(error.field, param, 1)
        message = message if param in message else f"{param}: {message}"
    return ApiError(400, message, param=param, code=_code_of(message))


def invalid_body(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Pydantic's complaints about the first bad field as one sentence, without what was sent."""
    first = errors[0]
    path = [str(part) for part in first["loc"] if part != "body"]
    param = path[0] if path else None
    match first["type"]:
        case "json_invalid":
            return ApiError(400, "the body is no JSON", code="invalid_json")
        case "extra_forbidden":
            message = f"{'.'.join(path)} is not supported by this server; leave it out"
            return ApiError(400, message, param=param, code="unsupported_field")
        case "missing":
            return ApiError(400, f"{'.'.join(path) or 'a JSON object'} is required", param=param, code="missing_field")
        case "refused":
            return ApiError(400, first["msg"], param=first["ctx"]["param"], code="invalid_value")
        case "model_attributes_type" if not path:
            return ApiError(400, "the body must be a JSON object", code="invalid_value")
    about_it = [error["msg"] for error in errors if error["loc"][: len(first["loc"])][:2] == first["loc"][:2]]
    message = " or ".join(dict.fromkeys(about_it))
    return ApiError(400, f"{param or 'the body'}: {message}", param=param, code="invalid_value")


def install(app: FastAPI) -> None:
    """Answer every error of the routes in this shape."""

    async def answer(request: Request, error: Exception) -> Response:
        return described(error).response(request.url.path)

    async def answer_unrouted(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _unrouted(request, error).response(request.url.path)

    async def answer_invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        refusal = invalid_body(error.errors()) if _is_called_json(request) else _not_called_json(request)
        return refusal.response(request.url.path)

    for kind in (Exception, InvalidRequestError, OverloadedError, RequestTimeoutError, EngineError):
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(HTTPException, answer_unrouted)
    app.add_exception_handler(RequestValidationError, answer_invalid)


def _unrouted(request: Request, error: HTTPException) -> ApiError:
    """What the framework refuses before a route sees it, in words that say what to do."""
    match error:
        case ApiError():
            return error
        case HTTPException(status_code=404):
            return ApiError(404, f"there is no {request.url.path!r} on this server", code="not_found")
        case HTTPException(status_code=405):
            allowed = (error.headers or {}).get("Allow", "")
            refusal = ApiError(405, f"{request.method} does not go with this path; use {allowed}", code="wrong_method")
            refusal.headers = error.headers
            return refusal
        case HTTPException(status_code=400, __cause__=Exception() as reason):
            return ApiError(400, f"the body cannot be read: {_why_unreadable(reason)}", code="invalid_json")
    return described(error)


def _why_unreadable(reason: Exception) -> str:
    match reason:
        case UnicodeDecodeError():
            return "it is not UTF-8"
        case RecursionError():
            return f"it {_TOO_DEEP}"
        case ValueError():
            return "a number has too many digits"
    return "it broke off"


def _is_called_json(request: Request) -> bool:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def _not_called_json(request: Request) -> ApiError:
    kind = request.headers.get("content-type", "")
    message = f"the Content-Type {kind!r} is not that of JSON; send the body as 'application/json'"
    return ApiError(400, message, code="invalid_content_type")


def _code_of(message: str) -> str:
    is_too_long = "max_model_len=" in message or "the KV cache holds" in message
    return "context_length_exceeded" if is_too_long else "invalid_value"
