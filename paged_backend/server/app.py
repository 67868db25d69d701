"""The routes."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

import fastapi
from fastapi import FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

import paged_backend
from paged_backend import OverloadedError
from paged_backend.server import (
    chat,
    completions,
    embeddings,
    errors,
    lora,
    messages,
    responses,
    scoring,
    tokens,
)
from paged_backend.server.errors import ApiError, JSONReply, in_words_of
from paged_backend.server.kv_map import add_kv_map
from paged_backend.server.metrics import CONTENT_TYPE
from paged_backend.server.middleware import AnswerHead, CountRequests, LimitBody, RequireKey
from paged_backend.server.models import Models
from paged_backend.server.page import add_page, page_paths
from paged_backend.server.protocol import (
    ChatRequest,
    CompletionRequest,
    CountTokensRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    LoadLoraRequest,
    MessagesRequest,
    ModelBody,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
    UnloadLoraRequest,
)
from paged_backend.server.replies import (
    ERRORS,
    OR_EVENTS,
    TYPED_ERRORS,
    ChatReply,
    CompletionReply,
    CountReply,
    DetokenizeReply,
    EmbeddingReply,
    MessageReply,
    ModelList,
    ModelReply,
    RerankReply,
    ResponseReply,
    ScoreReply,
    StatusReply,
    TokenizeReply,
    VersionReply,
)
from paged_backend.server.responses_protocol import ResponsesRequest
from paged_backend.server.serving import Serving
from paged_backend.server.streaming import (
    Event,
    EventStream,
    ResponseEventStream,
    TypedEventStream,
    unless_disconnected,
)
from paged_backend.server.tracing import TraceRequests, Tracing

B = TypeVar("B", bound=ModelBody)
T = TypeVar("T")
Work = Callable[[Serving, B], Awaitable[T]]


def create_app(models: Models, tracing: Tracing | None = None) -> FastAPI:
    """The whole API over these models; its requests are traced if there is somewhere to send that."""
    settings = models.settings
    app = FastAPI(
        title="paged-backend",
        version=paged_backend.__version__,
        root_path=settings.root_path,
        docs_url=None,  # its page loads scripts from the network
        redoc_url=None,
        responses=ERRORS,
    )
    errors.install(app)
    _add_generation(app, models)
    _add_vectors(app, models)
    _add_tokens(app, models)
    _add_models(app, models)
    _add_operation(app, models)
    if settings.allow_lora_updating:
        _add_lora_updating(app, models)
    if settings.ui:
        add_page(app)
        add_kv_map(app, models)
    # The last one added is the first to see a request.
    app.add_middleware(AnswerHead)
    app.add_middleware(LimitBody, max_bytes=settings.max_body_bytes, stall_timeout=settings.stall_timeout)
    app.add_middleware(CountRequests, models=models)
    if settings.api_keys:
        app.add_middleware(RequireKey, keys=settings.api_keys, open_paths=page_paths() if settings.ui else frozenset())
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.cors_origins, allow_methods=["*"], allow_headers=["*"]
        )
    if tracing is not None:
        app.add_middleware(TraceRequests, tracing=tracing)
    return app


def _add_generation(app: FastAPI, models: Models) -> None:
    @app.post("/v1/completions", response_class=JSONReply, response_model=CompletionReply, responses=OR_EVENTS)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        if body.stream:
            return await _streamed(models, request, body, completions.stream_completion, EventStream)
        return await _whole(models, request, body, completions.complete)

    @app.post("/v1/chat/completions", response_class=JSONReply, response_model=ChatReply, responses=OR_EVENTS)
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        if body.stream:
            return await _streamed(models, request, body, chat.stream_answer, EventStream)
        return await _whole(models, request, body, chat.answer)

    @app.post("/v1/responses", response_class=JSONReply, response_model=ResponseReply, responses=OR_EVENTS)
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        if body.stream:
            return await _streamed(models, request, body, responses.stream_response, ResponseEventStream)
        return await _whole(models, request, body, responses.respond)

    @app.get("/v1/responses/{response_id}", response_class=JSONReply)
    @app.delete("/v1/responses/{response_id}", response_class=JSONReply)
    async def stored_response(response_id: str) -> Response:
        """There is none: nothing is stored."""
        raise ApiError(404, "this server stores no responses", param="response_id", code="not_found")

    @app.post(
        "/v1/messages", response_class=JSONReply, response_model=MessageReply, responses={**TYPED_ERRORS, **OR_EVENTS}
    )
    async def create_message(body: MessagesRequest, request: Request) -> Response:
        if body.stream:
            return await _streamed(models, request, body, messages.stream_message, TypedEventStream)
        return await _whole(models, request, body, messages.message)

    @app.post("/v1/messages/count_tokens", response_class=JSONReply, response_model=CountReply, responses=TYPED_ERRORS)
    async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
        return await _whole(models, request, body, messages.count_tokens)


def _add_vectors(app: FastAPI, models: Models) -> None:
    @app.post("/v1/embeddings", response_class=JSONReply, response_model=EmbeddingReply)
    async def create_embeddings(body: EmbeddingRequest, request: Request) -> Response:
        return await _whole(models, request, body, embeddings.embed)

    @app.post("/v1/score", response_class=JSONReply, response_model=ScoreReply)
    @app.post("/score", response_class=JSONReply, response_model=ScoreReply)
    async def create_scores(body: ScoreRequest, request: Request) -> Response:
        return await _whole(models, request, body, scoring.score)

    @app.post("/v2/rerank", response_class=JSONReply, response_model=RerankReply)
    @app.post("/v1/rerank", response_class=JSONReply, response_model=RerankReply)
    @app.post("/rerank", response_class=JSONReply, response_model=RerankReply)
    async def rerank(body: RerankRequest, request: Request) -> Response:
        return await _whole(models, request, body, scoring.rerank)


def _add_tokens(app: FastAPI, models: Models) -> None:
    @app.post("/tokenize", response_class=JSONReply, response_model=TokenizeReply)
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        return await _whole(models, request, body, tokens.tokenize)

    @app.post("/detokenize", response_class=JSONReply, response_model=DetokenizeReply)
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        return await _whole(models, request, body, tokens.detokenize)


def _add_models(app: FastAPI, models: Models) -> None:
    created = int(time.time())

    def described(name: str) -> dict[str, Any]:
        serving = models.find(name)
        adapter = serving.lora_modules.get(name)
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "paged-backend",
            "root": serving.model if adapter is None else adapter.lora_path,
            "parent": None if adapter is None else serving.model_names[0],
            "max_model_len": serving.max_model_len,
        }

    @app.get("/v1/models", response_class=JSONReply, response_model=ModelList)
    @app.get("/v1/models/", include_in_schema=False)
    async def list_models() -> Response:
        return JSONReply({"object": "list", "data": [described(name) for name in models.names]})

    @app.get("/v1/models/{model:path}", response_class=JSONReply, response_model=ModelReply)
    async def retrieve_model(model: str) -> Response:
        return JSONReply(described(model))


def _add_lora_updating(app: FastAPI, models: Models) -> None:
    @app.post("/v1/load_lora_adapter", response_class=JSONReply, response_model=StatusReply)
    async def load_lora_adapter(body: LoadLoraRequest, request: Request) -> Response:
        await lora.load(await models.hold(request, None), body)
        return JSONReply({"status": f"loaded {body.lora_name}"})

    @app.post("/v1/unload_lora_adapter", response_class=JSONReply, response_model=StatusReply)
    async def unload_lora_adapter(body: UnloadLoraRequest, request: Request) -> Response:
        lora.unload(await models.hold(request, None), body)
        return JSONReply({"status": f"unloaded {body.lora_name}"})


def _add_operation(app: FastAPI, models: Models) -> None:
    @app.get("/health", response_class=JSONReply, response_model=StatusReply)
    async def health() -> Response:
        """200 if the loops of all loaded engines answer."""
        await models.stats()
        return JSONReply({"status": "ok"})

    @app.get("/ready", response_class=JSONReply, response_model=StatusReply)
    async def ready() -> Response:
        """200 if requests are taken."""
        if not models.is_ready:
            raise ApiError(503, "the server takes no requests now", code="not_ready", retry=True)
        return JSONReply({"status": "ready"})

    @app.get("/version", response_class=JSONReply, response_model=VersionReply)
    async def version() -> Response:
        return JSONReply({"version": paged_backend.__version__})

    add_metrics(app, models)


def add_metrics(app: FastAPI, models: Models) -> None:
    @app.get("/metrics", response_class=fastapi.responses.PlainTextResponse)
    async def metrics() -> Response:
        return Response(await models.exposition(), media_type=CONTENT_TYPE)


async def _whole(models: Models, request: Request, body: B, work: Work[B, dict[str, Any] | bytes]) -> Response:
    return JSONReply(await _done(models, request, body, work))


async def _streamed(
    models: Models,
    request: Request,
    body: B,
    work: Work[B, AsyncGenerator[Event, None]],
    kind: type[EventStream],
) -> Response:
    return kind(await _done(models, request, body, work), stall_timeout=models.settings.stall_timeout)


async def _done(models: Models, request: Request, body: B, work: Work[B, T]) -> T:
    """The result of work on the model that is asked for. It ends with its client, and is counted if it is refused
    because a queue is full."""

    async def on_its_model() -> T:
        serving = await models.hold(request, body.model)
        try:
            with in_words_of(body):
                return await work(serving, body)
        except OverloadedError:
            serving.metrics.rejected()
            raise

    return await unless_disconnected(request, on_its_model())
