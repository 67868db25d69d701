"""`Paged`: LlamaIndex's language model on the engine that this process shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from llama_index.core.base.llms.generic_utils import messages_to_prompt as generic_messages_to_prompt
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
)
from llama_index.core.bridge.pydantic import model_validator
from llama_index.core.constants import DEFAULT_NUM_OUTPUTS
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection, default_completion_to_prompt
from llama_index.core.tools.types import BaseTool

from llama_index.llms.paged.call import Call
from llama_index.llms.paged.engine_user import EngineUser
from llama_index.llms.paged.messages import has_open_answer, to_openai
from llama_index.llms.paged.metadata import PagedMetadata
from llama_index.llms.paged.responses import AsyncResponses, chat_response, completion_response, growing, whole
from llama_index.llms.paged.settings import SAMPLING_NAMES, RequestSettings, settings_of_call, with_sampling_by_name
from llama_index.llms.paged.structured import StructuredPredictions
from llama_index.llms.paged.tools import chat_arguments, selections, with_one_call
from paged_backend import SamplingParams


class Paged(EngineUser, RequestSettings, StructuredPredictions, FunctionCallingLLM):
    """A language model that runs in this process, on one paged and continuously batched engine per model.

    Whatever is asked at the same time, from threads, event loops, agents and other frameworks, is computed in the same
    batches: see `EngineUser` for which engine that is.

    >>> from llama_index.core import Settings
    >>> Settings.llm = Paged(model="demo", temperature=0, max_tokens=100)
    >>> Settings.tokenizer = Settings.llm.tokenizer

    A model that is loaded already is used in place: `Paged(model=hf_model, tokenizer=hf_tokenizer)`; so is an engine of
    your own: `Paged(llm=LLM(...))`.

    All settings of `RequestSettings` and all fields of `SamplingParams` can be given here and to each call.

    `chat` takes the model's chat template, or `messages_to_prompt` if that is given. `complete` asks the prompt as a
    user's message after `system_prompt`, or as `completion_to_prompt` says; with `formatted=True` the text goes to the
    model as it is. A conversation that ends with the assistant's words is continued.

    Leaving a stream's loop, closing it, or cancelling a task that waits ends the request and frees its memory.
    """

    context_window: int | None = None
    """What LlamaIndex is told of the context. None: what the engine has."""
    is_chat_model: bool = True
    """False, for models without a chat template: LlamaIndex then sends whole prompts instead of messages."""
    is_function_calling_model: bool = True
    """False: agents and programs put tools into the prompt's text instead of using the model's own format."""

    @model_validator(mode="before")
    @classmethod
    def _read_sampling(cls, values: dict[str, Any]) -> dict[str, Any]:
        return with_sampling_by_name(cls, values)

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        """Raise now what would be raised at the first call."""
        SamplingParams(**{"max_tokens": None} | Call.of("", settings_of_call(self, {})).sampling)
        return self

    @classmethod
    def _argument_names(cls) -> set[str]:
        return super()._argument_names() | SAMPLING_NAMES

    @classmethod
    def class_name(cls) -> str:
        return "Paged"

    @property
    def metadata(self) -> LLMMetadata:
        """Reading its `context_window` loads the model, if it is not in use yet; reading the rest does not."""
        known: dict[str, Any] = {
            "num_output": self.max_tokens or DEFAULT_NUM_OUTPUTS,
            "is_chat_model": self.is_chat_model,
            "is_function_calling_model": self.is_function_calling_model,
            "model_name": self.model,
        }
        if self.context_window is not None:
            return LLMMetadata(context_window=self.context_window, **known)
        return PagedMetadata.make(lambda: self.engine.max_model_len, **known)

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        call = self._chat_call(messages, kwargs)
        return whole(call.run(self.engine), self.model, chat_response)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        call = self._chat_call(messages, kwargs)
        return whole(await call.arun(await self._aengine()), self.model, chat_response)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        call = self._chat_call(messages, kwargs)
        return growing(call.stream(self.engine), self.model, chat_response)

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        call = self._chat_call(messages, kwargs)
        return AsyncResponses(call.astream(await self._aengine()), self.model, chat_response)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        call = self._completion_call(prompt, formatted, kwargs)
        return whole(call.run(self.engine), self.model, completion_response)

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        call = self._completion_call(prompt, formatted, kwargs)
        return whole(await call.arun(await self._aengine()), self.model, completion_response)

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        call = self._completion_call(prompt, formatted, kwargs)
        return growing(call.stream(self.engine), self.model, completion_response)

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        call = self._completion_call(prompt, formatted, kwargs)
        return AsyncResponses(call.astream(await self._aengine()), self.model, completion_response)

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        return selections(response, error_on_no_tool_call=error_on_no_tool_call)

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        tool_choice: str | dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        arguments = chat_arguments(
            tools,
            user_msg,
            chat_history,
            tool_choice=tool_choice,
            tool_required=tool_required,
            allow_parallel_tool_calls=allow_parallel_tool_calls,
        )
        return {**arguments, **kwargs}

    def _validate_chat_with_tools_response(
        self,
        response: ChatResponse,
        tools: Sequence[BaseTool],
        allow_parallel_tool_calls: bool = False,
        **kwargs: Any,
    ) -> ChatResponse:
        return response if allow_parallel_tool_calls else with_one_call(response)

    def _chat_call(self, messages: Sequence[ChatMessage], kwargs: Mapping[str, Any]) -> Call:
        settings = settings_of_call(self, kwargs)
        if self.messages_to_prompt not in (None, generic_messages_to_prompt):
            return Call.of(self.messages_to_prompt(messages), settings)
        settings.setdefault("continue_final_message", has_open_answer(messages))
        return Call.of(to_openai(messages), settings)

    def _completion_call(self, prompt: str, formatted: bool, kwargs: Mapping[str, Any]) -> Call:
        settings = settings_of_call(self, kwargs)
        if formatted:
            return Call.of(prompt, settings)
        if self.query_wrapper_prompt is not None:
            prompt = self.query_wrapper_prompt.format(query_str=prompt)
        if self.completion_to_prompt not in (None, default_completion_to_prompt):
            return Call.of(self.completion_to_prompt(prompt), settings)
        if not self.is_chat_model:
            return Call.of(prompt if self.system_prompt is None else f"{self.system_prompt}\n\n{prompt}", settings)
        messages = self._extend_messages([ChatMessage(role=MessageRole.USER, content=prompt)])
        return self._chat_call(messages, kwargs)
