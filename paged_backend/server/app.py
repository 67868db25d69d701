"""The routes."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import fastapi
from fastapi import FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

import paged_backend
from paged_backend import OverloadedError
from paged_backend.server import chat, completions, embeddings, errors, lora, messages, scoring, tokens
from paged_backend.server.errors import ApiError, JSONReply
from paged_backend.server.metrics import CONTENT_TYPE
from paged_backend.server.middleware import CountRequests, LimitBody, RequireKey
from paged_backend.server.protocol import (
    ChatRequest,
    CompletionRequest,
    CountTokensRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    GenerationBody,
    LoadLoraRequest,
    MessagesRequest,
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
    ScoreReply,
    StatusReply,
    TokenizeReply,
    VersionReply,
)
from paged_backend.server.serving import Serving
from paged_backend.server.streaming import Event, EventStream, TypedEventStream, unless_disconnected

B = TypeVar("B", bound=GenerationBody)
T = TypeVar("T")


def create_app(serving: Serving) -> FastAPI:
    """The whole API over one model."""
    settings = serving.settings
    app = FastAPI(
        title="paged-backend",
        version=paged_backend.__version__,
        root_path=settings.root_path,
        docs_url=None,  # its page loads scripts from the network
        redoc_url=None,
        responses=ERRORS,
    )
    errors.install(app)
    _add_generation(app, serving)
    _add_models(app, serving)
    _add_operation(app, serving)
    if settings.allow_lora_updating:
        _add_lora_updating(app, serving)
    # The last one added is the first to see a request.
    app.add_middleware(LimitBody, max_bytes=settings.max_body_bytes)
    app.add_middleware(CountRequests, serving=serving)
    if settings.api_keys:
        app.add_middleware(RequireKey, keys=settings.api_keys)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.cors_origins, allow_methods=["*"], allow_headers=["*"]
        )
    return app


def _add_generation(app: FastAPI, serving: Serving) -> None:
    @app.post("/v1/completions", response_class=JSONReply, response_model=CompletionReply, responses=OR_EVENTS)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        return await _generated(serving, request, body, completions.complete, completions.stream_completion)

    @app.post("/v1/chat/completions", response_class=JSONReply, response_model=ChatReply, responses=OR_EVENTS)
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        return await _generated(serving, request, body, chat.answer, chat.stream_answer)

    @app.post(
        "/v1/messages", response_class=JSONReply, response_model=MessageReply, responses={**TYPED_ERRORS, **OR_EVENTS}
    )
    async def create_message(body: MessagesRequest, request: Request) -> Response:
        async def work() -> Response:
            if body.stream:
                events = await messages.stream_message(serving, body)
                return TypedEventStream(events, stall_timeout=serving.settings.stall_timeout)
            return JSONReply(await messages.message(serving, body))

        return await _counted(serving, request, work())

    @app.post("/v1/messages/count_tokens", response_class=JSONReply, response_model=CountReply, responses=TYPED_ERRORS)
    async def count_tokens(body: CountTokensRequest) -> Response:
        return JSONReply(await messages.count_tokens(serving, body))

    @app.post("/v1/embeddings", response_class=JSONReply, response_model=EmbeddingReply)
    async def create_embeddings(body: EmbeddingRequest, request: Request) -> Response:
        return JSONReply(await _counted(serving, request, embeddings.embed(serving, body)))

    @app.post("/v1/score", response_class=JSONReply, response_model=ScoreReply)
    @app.post("/score", response_class=JSONReply, response_model=ScoreReply)
    async def create_scores(body: ScoreRequest, request: Request) -> Response:
        return JSONReply(await _counted(serving, request, scoring.score(serving, body)))

    @app.post("/v2/rerank", response_class=JSONReply, response_model=RerankReply)
    @app.post("/v1/rerank", response_class=JSONReply, response_model=RerankReply)
    @app.post("/rerank", response_class=JSONReply, response_model=RerankReply)
    async def rerank(body: RerankRequest, request: Request) -> Response:
        return JSONReply(await _counted(serving, request, scoring.rerank(serving, body)))

    @app.post("/tokenize", response_class=JSONReply, response_model=TokenizeReply)
    async def tokenize(body: TokenizeRequest) -> Response:
        return JSONReply(await tokens.tokenize(serving, body))

    @app.post("/detokenize", response_class=JSONReply, response_model=DetokenizeReply)
    async def detokenize(body: DetokenizeRequest) -> Response:
        return JSONReply(await tokens.detokenize(serving, body))


def _add_models(app: FastAPI, serving: Serving) -> None:
    created = int(time.time())

    def described(name: str) -> dict[str, Any]:
        adapter = serving.lora_modules.get(name)
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "paged-backend",
            "root": serving.model_names[0] if adapter is None else adapter.lora_path,
            "parent": None if adapter is None else serving.model_names[0],
            "max_model_len": serving.llm.max_model_len,
        }

    @app.get("/v1/models", response_class=JSONReply, response_model=ModelList)
    async def list_models() -> Response:
        return JSONReply(
            {"object": "list", "data": list(map(described, (*serving.model_names, *serving.lora_modules)))}
        )

    @app.get("/v1/models/{model:path}", response_class=JSONReply, response_model=ModelReply)
    async def retrieve_model(model: str) -> Response:
        serving.check_model(model)
        return JSONReply(described(model))


def _add_lora_updating(app: FastAPI, serving: Serving) -> None:
    @app.post("/v1/load_lora_adapter", response_class=JSONReply, response_model=StatusReply)
    async def load_lora_adapter(body: LoadLoraRequest) -> Response:
        await lora.load(serving, body)
        return JSONReply({"status": f"loaded {body.lora_name}"})

    @app.post("/v1/unload_lora_adapter", response_class=JSONReply, response_model=StatusReply)
    async def unload_lora_adapter(body: UnloadLoraRequest) -> Response:
        lora.unload(serving, body)
        return JSONReply({"status": f"unloaded {body.lora_name}"})


def _add_operation(app: FastAPI, serving: Serving) -> None:
    @app.get("/health", response_class=JSONReply, response_model=StatusReply)
    async def health() -> Response:
        """200 if the engine's loop answers."""
        await serving.stats()
        return JSONReply({"status": "ok"})

    @app.get("/ready", response_class=JSONReply, response_model=StatusReply)
    async def ready() -> Response:
        """200 if requests are taken."""
        if not serving.is_ready:
            raise ApiError(503, "the server takes no requests now", code="not_ready", retry=True)
        return JSONReply({"status": "ready"})

    @app.get("/version", response_class=JSONReply, response_model=VersionReply)
    async def version() -> Response:
        return JSONReply({"version": paged_backend.__version__})

    add_metrics(app, serving)


def add_metrics(app: FastAPI, serving: Serving) -> None:
    @app.get("/metrics", response_class=fastapi.responses.PlainTextResponse)
    async def metrics() -> Response:
        stats = await serving.stats() if serving.is_ready or serving.is_draining else None
        return Response(serving.metrics.exposition(stats), media_type=CONTENT_TYPE)


async def _generated(
    serving: Serving,
    request: Request,
    body: B,
    whole: Callable[[Serving, B], Awaitable[dict[str, Any]]],
    stream: Callable[[Serving, B], Awaitable[AsyncGenerator[Event, None]]],
) -> Response:
    async def work() -> Response:
        if body.stream:
            return EventStream(await stream(serving, body), stall_timeout=serving.settings.stall_timeout)
        return JSONReply(await whole(serving, body))

    return await _counted(serving, request, work())


async def _counted(serving: Serving, request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of work that ends with its client, and is counted if the queue has no room for it."""
    try:
        return await unless_disconnected(request, work)
    except OverloadedError:
        serving.metrics.rejected()
        raise
