"""One call of a model: what counts for its answer, in the engine's terms."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from llama_index.llms.paged.settings import OPTIONS, REQUEST_OPTIONS
from paged_backend import LLM, AsyncStream, InvalidRequestError, RequestHandle, RequestOutput, SamplingParams


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A text or a conversation, and how it is answered."""

    prompt: str | list[dict[str, Any]]
    sampling: dict[str, Any]
    options: dict[str, Any]

    @classmethod
    def of(cls, prompt: str | list[dict[str, Any]], settings: Mapping[str, Any]) -> Self:
        """Raises InvalidRequestError for several answers, as LlamaIndex has room for one."""
        if settings.get("n", 1) != 1:
            raise InvalidRequestError(f"n={settings['n']} answers do not fit in a response; use LLM.generate, or n=1")
        names = REQUEST_OPTIONS if isinstance(prompt, str) else OPTIONS
        return cls(
            prompt,
            sampling={name: value for name, value in settings.items() if name not in OPTIONS},
            options={name: settings[name] for name in names if name in settings},
        )

    def run(self, llm: LLM) -> RequestOutput:
        params = self._params(llm)
        if isinstance(self.prompt, str):
            return llm.generate(self.prompt, params, use_tqdm=False, **self.options)[0]
        return llm.chat(self.prompt, params, use_tqdm=False, **self.options)[0]

    async def arun(self, llm: LLM) -> RequestOutput:
        params = self._params(llm)
        if isinstance(self.prompt, str):
            return (await llm.agenerate(self.prompt, params, **self.options))[0]
        return (await llm.achat(self.prompt, params, **self.options))[0]

    def stream(self, llm: LLM) -> RequestHandle:
        params = self._params(llm)
        if isinstance(self.prompt, str):
            return llm.stream(self.prompt, params, **self.options)
        return llm.stream_chat(self.prompt, params, **self.options)

    def astream(self, llm: LLM) -> AsyncStream:
        params = self._params(llm)
        if isinstance(self.prompt, str):
            return llm.astream(self.prompt, params, **self.options)
        return llm.astream_chat(self.prompt, params, **self.options)

    def _params(self, llm: LLM) -> SamplingParams:
        """The model's recommendations, with what was given. Without a limit, an answer ends where the model ends it."""
        return llm.get_default_chat_params(**self.sampling)
