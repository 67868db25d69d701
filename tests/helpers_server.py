"""The server on an engine without a model."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import uvicorn
from transformers import PreTrainedTokenizerFast

from helpers import (
    VOCAB_SIZE,
    WAIT_SECONDS,
    FakeRunner,
    FakeSampler,
    FakeToken,
    byte_level_tokenizer,
    logprob_of,
    wait_until,
)
from paged_backend import LLM, Backend
from paged_backend.chat.tokenizer import Tokenizer
from paged_backend.engine.request import Sequence
from paged_backend.server.app import create_app
from paged_backend.server.models import Models
from paged_backend.server.serving import Serving
from paged_backend.server.settings import ServerSettings

SMILE = (b"\xf0\x9f", b"\x99\x82")
PIECES = (*SMILE, " Paris", "end")
FIRST_HALF, SECOND_HALF, PARIS, END_WORD, END = range(256, 261)
"""Ids below 256 are the bytes."""
JSON = {"Content-Type": "application/json"}
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'tool' and forbids_tools %}"
    "{{ raise_exception('no tools here') }}{% endif %}"
    "<{{ message['role'] }}>{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}"
    "{% for name, value in call.function.arguments.items() %}[{{ name }}={{ value }}]{% endfor %}{% endfor %}"
    "{% if not loop.last or add_generation_prompt or message['role'] != 'assistant' %}<end>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


class ScriptedSampler(FakeSampler):
    """Samples the tokens of `script`, over and over, if it has any; gives `logprob` to all, if that is set."""

    def __init__(self, vocab_size: int = VOCAB_SIZE) -> None:
        super().__init__(vocab_size)
        self.script: list[int] = []
        self.logprob: float | None = None

    def sample(self, logits: list[list[int]], sequences: list[Sequence]) -> list[FakeToken]:
        tokens = super().sample(logits, sequences)
        return [self._scripted(*item) for item in zip(tokens, logits, sequences, strict=True)]

    def _scripted(self, token: FakeToken, context: list[int], sequence: Sequence) -> FakeToken:
        token_id = self.script[sequence.num_output_tokens % len(self.script)] if self.script else token.token_id
        if token.logprobs is None:
            return FakeToken(token_id, None)
        value, _ = logprob_of(context, token_id)
        best = {rank: token_id if rank == 1 else (token_id + rank) % 256 for rank in range(1, 4)}
        number = value if self.logprob is None else self.logprob
        return FakeToken(token_id, {best[rank]: (number - rank + 1, rank) for rank in best})


@dataclasses.dataclass
class ServerUnderTest:
    """An engine on fakes and the app over it."""

    llm: LLM
    runner: FakeRunner
    sampler: ScriptedSampler
    models: Models
    app: Any

    @property
    def serving(self) -> Serving:
        """Of the only model."""
        (serving,) = self.models.servings
        return serving

    @contextlib.asynccontextmanager
    async def client(self, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server", **options) as client:
            yield client

    async def post(self, path: str, **body: Any) -> httpx.Response:
        async with self.client() as client:
            return await client.post(path, content=json.dumps(body), headers=JSON)

    async def get(self, path: str, **options: Any) -> httpx.Response:
        async with self.client() as client:
            return await client.get(path, **options)

    async def complete(self, prompt: Any = "hello", **body: Any) -> Any:
        """The JSON of a completion, whose status must be 200."""
        return answered(await self.post("/v1/completions", prompt=prompt, **body))

    async def chat(self, content: str = "hello", **body: Any) -> Any:
        return answered(await self.post("/v1/chat/completions", **{"messages": [user(content)]} | body))

    async def chunks(self, path: str, **body: Any) -> list[Any]:
        """The events of a stream that ends as it should."""
        response = await self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        events = events_of(response.text)
        assert events[-1] == "[DONE]"
        return [json.loads(event, parse_constant=_no_such_number) for event in events[:-1]]

    @contextlib.contextmanager
    def live(self) -> Iterator[str]:
        """A real server on a free port, in a thread; its address."""
        config = uvicorn.Config(
            self.app, port=0, http="httptools", ws="none", lifespan="off", log_level="warning", access_log=False
        )
        config.timeout_graceful_shutdown = 1
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        try:
            wait_until(lambda: server.started)
            yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(WAIT_SECONDS)
            assert not thread.is_alive()


def make_server(
    *,
    num_blocks: int = 1024,
    max_model_len: int = 2048,
    template: str | None = CHAT_TEMPLATE,
    engine: dict[str, Any] | None = None,
    **settings: Any,
) -> ServerUnderTest:
    """`settings` are those of the server, `engine` those of `EngineConfig`."""
    llm, runner, sampler = make_scripted_llm(
        num_blocks=num_blocks, max_model_len=max_model_len, template=template, **engine or {}
    )
    models = make_models(ServerSettings(**settings), llm=llm)
    return ServerUnderTest(llm, runner, sampler, models, create_app(models))


def make_models(settings: ServerSettings | None = None, **how: Any) -> Models:
    """Only one: `llm` is there, or `make` makes it when the server starts."""
    settings = settings or ServerSettings()
    return Models(settings, [Serving(settings, model="fake", **how)])


def make_scripted_llm(
    *,
    num_blocks: int = 1024,
    max_model_len: int = 2048,
    template: str | None = CHAT_TEMPLATE,
    default_sampling: dict[str, Any] | None = None,
    **config: Any,
) -> tuple[LLM, FakeRunner, ScriptedSampler]:
    tokenizer = make_chat_tokenizer(template)
    runner = FakeRunner(num_blocks=num_blocks, block_size=4, vocab_size=len(tokenizer))
    sampler = ScriptedSampler(256)
    backend = Backend(
        name="fake",
        runner=runner,
        sampler=sampler,
        tokenizer=Tokenizer(tokenizer),
        max_model_len=max_model_len,
        eos_token_ids=frozenset([END]),
        default_sampling=default_sampling or {},
    )
    return LLM.from_backend(backend, **{"block_size": 4, "max_num_batched_tokens": 64} | config), runner, sampler


def make_chat_tokenizer(template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer(*PIECES), eos_token="<end>")
    tokenizer.chat_template = template
    return tokenizer


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def answered(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return json.loads(response.content, parse_constant=_no_such_number)


def refusal(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error object of an answer, which must have exactly OpenAI's fields."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    (error,) = json.loads(response.content).values()
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in error["message"] and "Error" not in error["message"]
    return dict(error)


def events_of(text: str) -> list[str]:
    assert text.endswith("\n\n")
    return [event.removeprefix("data: ") for event in text[:-2].split("\n\n")]


def _no_such_number(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")
