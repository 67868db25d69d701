"""The reader's end of one request: wait for its result, iterate over it, or abort it."""

from __future__ import annotations

import dataclasses
import threading
import time
import weakref
from types import TracebackType
from typing import Self

from paged_backend.engine.loop import EngineLoop, News
from paged_backend.engine.outbox import Outbox
from paged_backend.engine.request import Request
from paged_backend.errors import EngineError
from paged_backend.outputs import CompletionOutput, RequestOutput
from paged_backend.sampling_params import RequestOutputKind


class RequestHandle:
    """One running request, for threads and for tasks of any event loop.

    `for output in handle` and `async for output in handle` give what is new since the last output (or what the
    request's `output_kind` says). Closing the handle, leaving its `with` block, cancelling a task that waits for it or
    dropping it aborts the request; its blocks are free again within a step.
    """

    def __init__(self, request: Request, outbox: Outbox[News], loop: EngineLoop) -> None:
        self._request = request
        self._outbox = outbox
        self._kind = request.params.output_kind or RequestOutputKind.DELTA
        self._whole = [CompletionOutput(index) for index in range(request.params.n)]
        form = request.markup.output_format
        self._parsers = [] if form is None else [form.parser() for _ in self._whole]
        self._error: Exception | None = None
        self._is_finished = False
        self._lock = threading.Lock()
        self._is_exhausted = False
        self._num_yielded = 0
        self._abort = weakref.finalize(self, loop.abort, request)
        self._abort.atexit = False

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def max_tokens(self) -> int:
        """The most tokens that each of its outputs may have: what was asked for, or what there is room for."""
        return self._request.max_tokens

    @property
    def finished(self) -> bool:
        """Whether everything, or the error that ended the request, has been read."""
        return self._is_finished

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the whole output. Raises the error that ended the request, or TimeoutError after `timeout` seconds
        (the request goes on)."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.finished:
            try:
                self._outbox.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                raise TimeoutError(
                    f"request {self.request_id} did not finish within {timeout} s; it goes on: wait again or abort() it"
                ) from None
            self._read()
        return self._result()

    async def aresult(self) -> RequestOutput:
        """Wait for the whole output; cancelling the task aborts the request."""
        try:
            while not self.finished:
                await self._outbox.wait_async()
                self._read()
        except BaseException:
            self.abort()
            raise
        return self._result()

    def abort(self) -> None:
        """End the request; its reader gets finish reason `abort`. Aborting a finished request changes nothing."""
        self._abort()

    def close(self) -> None:
        """Abort, and stop iterating."""
        self._is_exhausted = True
        self.abort()

    async def aclose(self) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> RequestOutput:
        while not self._is_over():
            self._outbox.wait()
            output = self._output(self._read())
            if output is not None:
                return output
        raise StopIteration

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        try:
            while not self._is_over():
                await self._outbox.wait_async()
                output = self._output(self._read())
                if output is not None:
                    return output
        except BaseException:
            self.close()
            raise
        raise StopAsyncIteration

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _is_over(self) -> bool:
        """Whether iteration has come to its end; raises the error that ended the request."""
        if self._is_exhausted:
            return True
        if self._error is not None:
            self._is_exhausted = True
            raise self._error
        return self.finished

    def _read(self) -> list[CompletionOutput]:
        """Add the news to the whole output; returns them joined, one per sample. One reader at a time, in order."""
        news: dict[int, CompletionOutput] = {}
        with self._lock:
            for item in self._outbox.take():
                if isinstance(item, Exception):
                    self._error = self._error or item
                elif self._error is None and self._is_parsed(item):
                    _join(news, item)
                    _extend(self._whole[item.index], item)
            del self._whole[self._request.num_outputs :]
            self._is_finished = self._error is not None or all(output.finished() for output in self._whole)
        if self._is_finished:
            self._abort.detach()
        return list(news.values())

    def _is_parsed(self, item: CompletionOutput) -> bool:
        """Whether its text could be read; a mistake in a parser ends the request."""
        try:
            if self._parsers:
                self._parsers[item.index].parse(item)
        except Exception as error:
            self.abort()
            self._error = EngineError(f"the output of request {self.request_id} could not be read: {error!r}")
            self._error.__cause__ = error
            return False
        return True

    def _output(self, news: list[CompletionOutput]) -> RequestOutput | None:
        """What iteration gives for the news, or None if it gives nothing yet."""
        if not news or (self._kind is RequestOutputKind.FINAL_ONLY and not self.finished):
            return None
        is_delta = self._kind is RequestOutputKind.DELTA
        output = self._request_output(news if is_delta else [_copied(whole) for whole in self._whole])
        if is_delta and self._num_yielded:
            output.prompt_logprobs = None
        self._num_yielded += 1
        return output

    def _result(self) -> RequestOutput:
        if self._error is not None:
            raise self._error
        return self._request_output(self._whole)

    def _request_output(self, outputs: list[CompletionOutput]) -> RequestOutput:
        request = self._request
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=outputs,
            finished=self.finished,
            prompt_logprobs=request.prompt_logprobs,
            num_cached_tokens=request.sequences[0].num_cached_tokens,
            metrics=request.metrics,
        )


def _join(news: dict[int, CompletionOutput], item: CompletionOutput) -> None:
    """Add to what is new of its output; alone it stays as it is, but for pieces of one call, which become one."""
    if item.index not in news and not item.tool_calls and not item.invalid_tool_calls:
        news[item.index] = item
    else:
        _extend(news.setdefault(item.index, CompletionOutput(item.index)), item)


def _extend(whole: CompletionOutput, news: CompletionOutput) -> None:
    whole.text += news.text
    whole.token_ids += news.token_ids
    whole.cumulative_logprob, whole.score = news.cumulative_logprob, news.score
    if news.logprobs is not None:
        if whole.logprobs is None:
            whole.logprobs = []
        whole.logprobs += news.logprobs
    whole.finish_reason, whole.stop_reason = news.finish_reason, news.stop_reason
    if news.reasoning is not None:
        whole.reasoning = (whole.reasoning or "") + news.reasoning
    _extend_calls(whole, news)


def _extend_calls(whole: CompletionOutput, news: CompletionOutput) -> None:
    calls = {call.index: call for call in whole.tool_calls}
    for piece in news.tool_calls:
        if piece.index in calls:
            calls[piece.index].arguments += piece.arguments
        else:
            calls[piece.index] = dataclasses.replace(piece)
    for invalid in news.invalid_tool_calls:
        calls.pop(invalid.index, None)
    if news.tool_calls or news.invalid_tool_calls:
        whole.tool_calls = list(calls.values())
        whole.invalid_tool_calls += news.invalid_tool_calls


def _copied(output: CompletionOutput) -> CompletionOutput:
    copy = CompletionOutput(output.index)
    _extend(copy, output)
    return copy
