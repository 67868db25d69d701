"""Token counts as OpenAI reports them: of the ids themselves, each prompt once, whatever `n` is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from paged_backend import RequestOutput


class Usage:
    """Counts the outputs of one answer, whole or piece by piece."""

    def __init__(self) -> None:
        self._prompts: dict[str, RequestOutput] = {}
        self._num_completion_tokens = 0

    @classmethod
    def of(cls, outputs: Iterable[RequestOutput]) -> Usage:
        usage = cls()
        for output in outputs:
            usage.add(output)
        return usage

    def add(self, output: RequestOutput) -> None:
        self._prompts[output.request_id] = output
        self._num_completion_tokens += output.num_output_tokens

    def reply(self) -> dict[str, Any]:
        num_prompt_tokens = sum(len(output.prompt_token_ids) for output in self._prompts.values())
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": self._num_completion_tokens,
            "total_tokens": num_prompt_tokens + self._num_completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(output.num_cached_tokens for output in self._prompts.values())
            },
        }
