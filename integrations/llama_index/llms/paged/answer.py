"""One answer, growing by the engine's outputs, in LlamaIndex's terms."""

from __future__ import annotations

import dataclasses
from typing import Any

from llama_index.core.base.llms.types import ContentBlock, LogProb, TextBlock, ThinkingBlock, ToolCallBlock
from pydantic_core import from_json

from paged_backend import CompletionOutput, Logprob, RequestOutput, ToolCall


class Answer:
    """An answer that grows by the outputs of one request; a whole output makes it whole at once.

    What is called `delta` is what the last output added; all else is the answer so far.
    """

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._num_output_tokens = 0
        self._reasoning = ""
        self._calls: dict[int, ToolCall] = {}
        self._invalid_calls: list[dict[str, Any]] = []
        self.text = ""
        self.delta = ""
        self.reasoning_delta = ""
        self.logprobs: list[list[LogProb]] | None = None
        """Of the tokens of the last output: the chosen one first, then the most likely ones."""
        self.raw: dict[str, Any] = {}

    def add(self, output: RequestOutput) -> bool:
        """Whether there is anything to show: half a character, say, is nothing yet."""
        self._num_output_tokens += output.num_output_tokens
        (news,) = output.outputs
        self.delta, self.reasoning_delta = news.text, news.reasoning or ""
        self.text += self.delta
        self._reasoning += self.reasoning_delta
        self._add_calls(news)
        self.logprobs = _logprobs(news)
        self.raw = self._raw(output, news)
        return bool(news.text or news.reasoning or news.tool_calls or news.logprobs or output.finished)

    @property
    def blocks(self) -> list[ContentBlock]:
        """Reasoning, text and calls. There is always a text if there is no call."""
        blocks: list[ContentBlock] = []
        if self._reasoning:
            blocks.append(ThinkingBlock(content=self._reasoning))
        if self.text or not self._calls:
            blocks.append(TextBlock(text=self.text))
        return blocks + [_block(call) for call in self._calls.values()]

    def _add_calls(self, news: CompletionOutput) -> None:
        for piece in news.tool_calls:
            if piece.index in self._calls:
                self._calls[piece.index].arguments += piece.arguments
            else:
                self._calls[piece.index] = dataclasses.replace(piece)
        for invalid in news.invalid_tool_calls:
            self._calls.pop(invalid.index, None)
            self._invalid_calls.append(dataclasses.asdict(invalid))

    def _raw(self, output: RequestOutput, news: CompletionOutput) -> dict[str, Any]:
        """As in OpenAI's API. The usage comes once, at the end, so that sums over a stream are right."""
        raw: dict[str, Any] = {
            "id": output.request_id,
            "model": self._model_name,
            "finish_reason": news.finish_reason,
            "stop_reason": news.stop_reason,
        }
        if self._invalid_calls:
            raw["invalid_tool_calls"] = self._invalid_calls
        return raw | {"usage": _usage(output, self._num_output_tokens)} if output.finished else raw


def _block(call: ToolCall) -> ToolCallBlock:
    """While the arguments are being written, those that are there."""
    try:
        arguments = from_json(call.arguments, allow_partial="trailing-strings")
    except ValueError:
        arguments = None
    kwargs = arguments if isinstance(arguments, dict) else {}
    return ToolCallBlock(tool_call_id=call.id, tool_name=call.name or "", tool_kwargs=kwargs)


def _usage(output: RequestOutput, num_output_tokens: int) -> dict[str, Any]:
    num_prompt_tokens = len(output.prompt_token_ids)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
    }


def _logprobs(news: CompletionOutput) -> list[list[LogProb]] | None:
    if news.logprobs is None:
        return None
    return [[_logprob(logprob) for logprob in position.values()] for position in news.logprobs]


def _logprob(logprob: Logprob) -> LogProb:
    text = logprob.decoded_token or ""
    is_whole = "\ufffd" not in text  # half a character is not to be had as bytes
    return LogProb(token=text, logprob=logprob.logprob, bytes=list(text.encode()) if is_whole else [])
