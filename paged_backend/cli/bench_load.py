"""Puts a load on a server or on an engine in this process, and notes when each piece of each answer comes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import httpx

from paged_backend import ConfigError, PagedBackendError
from paged_backend.cli.bench_data import Question

if TYPE_CHECKING:
    from paged_backend import LLM

_WANTS_KEY = (401, 403)
_MOST_TEXT = 300
_TIMEOUT = httpx.Timeout(30.0, read=None)


class Piece(NamedTuple):
    """What comes of an answer at a time; counts are told with the last piece at the latest."""

    num_prompt_tokens: int = 0
    num_output_tokens: int | None = None
    """Of the whole answer so far; None: not told."""
    has_text: bool = True


class Target(Protocol):
    def pieces(self, question: Question) -> AsyncIterator[Piece]:
        """The answer as it comes; raises what goes wrong."""
        ...


@dataclasses.dataclass(slots=True)
class Answer:
    """When a question was asked and each piece of its answer came, in seconds since the start."""

    start: float
    times: list[float] = dataclasses.field(default_factory=list)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    error: str | None = None

    @property
    def end(self) -> float:
        return self.times[-1] if self.times else self.start

    @property
    def seconds_to_first(self) -> float | None:
        return self.times[0] - self.start if self.times else None

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """When questions are asked."""

    request_rate: float = math.inf
    """Questions per second, on average; inf: all at once."""
    burstiness: float = 1.0
    """1: as independent people ask; less: in bursts; more: evenly."""
    max_concurrency: int | None = None
    """Most questions that wait for their answers' ends at a time."""

    def __post_init__(self) -> None:
        for name in ("request_rate", "burstiness"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} is out of range: it must be > 0")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(f"max_concurrency={self.max_concurrency} is out of range: it must be ≥ 1")

    def delays(self, seed: int) -> Iterator[float]:
        """Seconds from one question to the next."""
        rng = random.Random(seed)
        while True:
            mean = 1 / self.request_rate
            yield rng.gammavariate(self.burstiness, mean / self.burstiness) if mean else 0.0


async def put_load(
    target: Target, questions: Sequence[Question], pace: Pace, seed: int, on_answer: Callable[[Answer], object]
) -> list[Answer]:
    """Ask all questions; their answers, in order. What goes wrong with one is noted in its answer."""
    room: contextlib.AbstractAsyncContextManager[object] = contextlib.nullcontext()
    if pace.max_concurrency is not None:
        room = asyncio.Semaphore(pace.max_concurrency)
    begin = time.perf_counter()

    async def ask(question: Question) -> Answer:
        async with room:
            answer = Answer(time.perf_counter() - begin)
            try:
                await _note(answer, target.pieces(question), begin)
            except PagedBackendError as error:
                answer.error = str(error)
        on_answer(answer)
        return answer

    asking, due = [], 0.0
    for question, delay in zip(questions, pace.delays(seed), strict=False):
        await asyncio.sleep(begin + due - time.perf_counter())
        asking.append(asyncio.create_task(ask(question)))
        due += delay
    return await asyncio.gather(*asking)


async def _note(answer: Answer, pieces: AsyncIterator[Piece], begin: float) -> None:
    async for piece in pieces:
        if piece.has_text:
            answer.times.append(time.perf_counter() - begin)
        answer.num_prompt_tokens = max(answer.num_prompt_tokens, piece.num_prompt_tokens)
        answer.num_output_tokens = piece.num_output_tokens or max(answer.num_output_tokens, len(answer.times))
    if not answer.times:
        raise BadAnswer("the answer was empty")


class BadAnswer(PagedBackendError):
    """A server did not answer as it should."""


class InProcess:
    """An engine in this process."""

    def __init__(self, llm: LLM, *, is_chat: bool, ignore_eos: bool) -> None:
        self._llm, self._is_chat = llm, is_chat
        self._sampling = {"temperature": 0.0, "ignore_eos": ignore_eos}

    async def pieces(self, question: Question) -> AsyncIterator[Piece]:
        params = self._llm.get_default_chat_params(**self._sampling, max_tokens=question.max_tokens)
        if self._is_chat:
            stream = self._llm.astream_chat(_messages(question), params)
        else:
            stream = self._llm.astream(question.prompt, params)
        num_tokens = 0
        async with stream:
            async for output in stream:
                num_tokens += output.num_output_tokens
                yield Piece(len(output.prompt_token_ids), num_tokens)


class Server:
    """A server that speaks OpenAI's API."""

    def __init__(self, client: httpx.AsyncClient, model: str, *, is_chat: bool, ignore_eos: bool) -> None:
        self._client, self._model, self._is_chat = client, model, is_chat
        self._path = "/v1/chat/completions" if is_chat else "/v1/completions"
        self._extra = {"ignore_eos": True} if ignore_eos else {}

    async def pieces(self, question: Question) -> AsyncIterator[Piece]:
        wish = {"messages": _messages(question)} if self._is_chat else {"prompt": question.prompt}
        options = {"max_tokens": question.max_tokens, "temperature": 0, "stream": True, **self._extra}
        body = {"model": self._model, **wish, **options, "stream_options": {"include_usage": True}}
        try:
            async with self._client.stream("POST", self._path, json=body) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    raise BadAnswer(f"status {response.status_code}: {text[:_MOST_TEXT]}")
                async for event in _events(response.aiter_lines()):
                    yield _piece(event)
        except (httpx.HTTPError, ValueError) as error:
            raise BadAnswer(f"{type(error).__name__}: {error}") from error


def http_client(base_url: str, api_key: str | None) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    return httpx.AsyncClient(base_url=base_url, headers=headers, timeout=_TIMEOUT, limits=limits)


async def served_model(client: httpx.AsyncClient) -> str:
    """The first model of a server; raises ConfigError if it does not tell."""
    try:
        response = await client.get("/v1/models")
        if response.status_code != 200:
            hint = "; give its --api-key" if response.status_code in _WANTS_KEY else ""
            raise ValueError(f"status {response.status_code}{hint}")
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"base_url={str(client.base_url)!r} does not tell which models it serves: {error}") from None


def _messages(question: Question) -> list[dict[str, str]]:
    return [{"role": "user", "content": question.prompt}]


async def _events(lines: AsyncIterator[str]) -> AsyncIterator[Any]:
    async for line in lines:
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))
    raise BadAnswer("the stream broke off")


def _piece(event: Any) -> Piece:
    if "error" in event:
        raise BadAnswer(str(event["error"]))
    usage = event.get("usage") or {}
    choices = event.get("choices") or [{}]
    delta = choices[0].get("delta", choices[0])
    has_text = any(delta.get(name) for name in ("content", "text", "reasoning", "reasoning_content", "tool_calls"))
    return Piece(usage.get("prompt_tokens", 0), usage.get("completion_tokens"), has_text)
