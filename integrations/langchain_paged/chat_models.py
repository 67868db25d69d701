"""`ChatPaged`: LangChain's chat model on the engine that this process shares."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Literal

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LangSmithParams, LanguageModelInput, ModelProfile
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableConfig

from langchain_paged.call import Chat, settings_of_call
from langchain_paged.language_model import EngineLanguageModel
from langchain_paged.outputs import AsyncChunks
from langchain_paged.settings import ChatSettings
from langchain_paged.structured import parser_of, with_raw
from langchain_paged.tools import Tool, check_choice, json_schema_of, name_of, to_choice_of, to_tool_choice, to_tools
from paged_backend import AsyncStream, InvalidRequestError, unknown_name

_OF_STRUCTURED_OUTPUT = ("schema", "method", "include_raw", "strict")


class ChatPaged(ChatSettings, EngineLanguageModel, BaseChatModel):
    """A chat model that runs in this process, on one paged and continuously batched engine per model.

    All ChatPaged objects of the same `model` and `engine_kwargs` share an engine, which is made at the first call and
    is the one that `LLM.shared` returns. Whatever they are asked at the same time, from threads, event loops and
    chains, is computed in the same batches. Making, copying and pickling a ChatPaged loads nothing.

    Setup:
        ```bash
        pip install 'paged-backend[langchain]'
        ```

    Instantiate:
        ```python
        from langchain_paged import ChatPaged

        model = ChatPaged(model="demo", temperature=0, max_tokens=100)
        ```

        All settings of `ChatSettings` can be given here, to `bind` and to each call. An unknown name is a warning
        here, as LangChain's models are often made from settings of other models, and an error in a call.

    Invoke:
        ```python
        message = model.invoke("Name a colour.")
        message.content, message.usage_metadata, message.response_metadata["finish_reason"]
        ```

        A conversation that ends with an AIMessage is continued: the answer goes on where that message stops.

    Stream:
        ```python
        for chunk in model.stream("Name a colour."):
            print(chunk.content, end="")
        ```

        Leaving the loop ends the request and frees its memory.

    Batch:
        ```python
        model.batch(["Name a colour.", "Name a fruit."])
        ```

        All inputs are in the engine at once; `config={"max_concurrency": 4}` limits that.

    Async:
        ```python
        await model.ainvoke("Name a colour.")
        async for chunk in model.astream("Name a colour."):
            ...
        await model.abatch(["Name a colour.", "Name a fruit."])
        ```

        Cancelling the task ends its requests.

    Call tools:
        ```python
        answer = model.bind_tools([add], tool_choice="any").invoke("What is 2 + 3?")
        answer.tool_calls
        ```

        Forced calls follow the tools' schemas, whatever the model.

    Structured output:
        ```python
        model.with_structured_output(Person).invoke("Who wrote Faust?")
        ```

    Reasoning:
        What a model thinks before its answer is in `additional_kwargs["reasoning_content"]` and in `content_blocks`,
        and not in `content`. `chat_template_kwargs={"enable_thinking": False}` switches it off where the template can.

    Use an engine of your own, or a model that is loaded already:
        ```python
        ChatPaged(llm=LLM(hf_model, tokenizer))
        ```
    """

    streaming: bool | None = None
    """True: `invoke` streams for the callbacks' sake; False: `stream` does not stream."""

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """How many `input_tokens` these messages are when they are sent, everything that the template adds included."""
        if not messages:
            return 0
        call = self._call(messages, None, {"tools": tools})
        return len(self._engine(self.model).encode_chat(call.messages, **call.prompt_options))

    def bind_tools(
        self,
        tools: Sequence[Tool],
        *,
        tool_choice: str | dict[str, Any] | bool | None = None,
        strict: bool | None = None,
        parallel_tool_calls: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """A model that may call these tools: functions, classes, `BaseTool`s or OpenAI's definitions.

        `tool_choice`: None or `"auto"` leaves it to the model, `"none"` forbids calls, `"any"`, `"required"` or True
        forces at least one, and a name, or OpenAI's mapping with one, forces that tool. Forced calls follow the tool's
        schema, as do all calls with `strict=True`. `parallel_tool_calls=False` allows one call per answer.
        """
        definitions, choice = to_tools(tools, strict), to_tool_choice(tool_choice)
        check_choice(choice, definitions)
        given = {"tool_choice": choice, "parallel_tool_calls": parallel_tool_calls}
        given = {name: value for name, value in given.items() if value is not None}
        return self.bind(tools=definitions, **given, **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type | None = None,
        *,
        method: Literal["json_schema", "function_calling", "json_mode"] = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """A model whose answer is an object of `schema`: a pydantic class of either version, a TypedDict, a JSON schema
        or an OpenAI function. The last three give a `dict`.

        `json_schema` lets the model write nothing but JSON of that schema, `function_calling` forces a call of it,
        `json_mode` forces some JSON object, whose form the prompt must ask for. An answer that is cut off raises
        OutputParserException. With `include_raw`, the result is a `dict` of `raw`, `parsed` and `parsing_error`.
        """
        if kwargs:
            raise InvalidRequestError(unknown_name("with_structured_output", next(iter(kwargs)), _OF_STRUCTURED_OUTPUT))
        model = self._bind_schema(schema, method, strict)
        parser = parser_of(schema, of_calls=method == "function_calling")
        return with_raw(model, parser) if include_raw else model | parser

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """Answer all inputs at once, in order; `max_concurrency` in `config` limits how many are in the engine."""
        configs = self._all_at_once(config, len(inputs))
        return super().batch(inputs, configs, return_exceptions=return_exceptions, **kwargs)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call = self._call(messages, stop, kwargs)
        llm = self._engine(call.model)
        return call.chat_result(llm.chat(call.messages, call.sampling_params(llm), use_tqdm=False, **call.chat_options))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call = self._call(messages, stop, kwargs)
        llm = await self._aengine(call.model)
        return call.chat_result(await llm.achat(call.messages, call.sampling_params(llm), **call.chat_options))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        # LangChain itself reports each chunk to the callbacks: reporting it here too would count it twice.
        call = self._call(messages, stop, kwargs)
        writer = call.message_writer(as_blocks=self.output_version == "v1")
        llm = self._engine(call.model)
        with llm.stream_chat(call.messages, call.sampling_params(llm), **call.chat_options) as outputs:
            for output in outputs:
                yield from writer.write(output)

    def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        call = self._call(messages, stop, kwargs)

        async def start() -> AsyncStream:
            llm = await self._aengine(call.model)
            return llm.astream_chat(call.messages, call.sampling_params(llm), **call.chat_options)

        return AsyncChunks(start, call.message_writer(as_blocks=self.output_version == "v1"))

    def _bind_schema(self, schema: Any, method: str, strict: bool | None) -> Runnable[LanguageModelInput, AIMessage]:
        traced = {"ls_structured_output_format": {"kwargs": {"method": method, "strict": strict}, "schema": schema}}
        if method == "json_mode":
            return self.bind(response_format={"type": "json_object"}, **(traced if schema is not None else {}))
        if schema is None:
            raise InvalidRequestError(f"method={method!r} needs a schema; method='json_mode' does not")
        if method == "json_schema":
            json_schema = {"name": name_of(schema), "schema": json_schema_of(schema), "strict": True}
            return self.bind(response_format={"type": "json_schema", "json_schema": json_schema}, **traced)
        if method == "function_calling":
            name = to_tools([schema])[0]["function"]["name"]
            return self.bind_tools(
                [schema], tool_choice=to_choice_of(name), strict=strict, parallel_tool_calls=False, **traced
            )
        raise InvalidRequestError(f"method={method!r} must be one of 'json_schema', 'function_calling', 'json_mode'")

    @property
    def _llm_type(self) -> str:
        return "chat-paged"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """Whatever changes the answer, for traces and for the keys of LLM caches."""
        settings = settings_of_call(self, None, {})
        # LangChain puts the call's stop under `stop`, also if there is none, and would hide the field's.
        settings["stop_sequences"] = settings.pop("stop")
        given = {name: value for name, value in settings.items() if value is not None}
        return {**self._engine_identity, **given}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        own = [self.stop] if isinstance(self.stop, str) else self.stop
        params = super()._get_ls_params(stop=own if stop is None else stop, **kwargs)
        params["ls_provider"] = "paged"
        return params

    def _resolve_model_profile(self) -> ModelProfile:
        profile = ModelProfile(
            text_inputs=True,
            image_inputs=False,
            audio_inputs=False,
            video_inputs=False,
            text_outputs=True,
            tool_calling=True,
            tool_choice=True,
            tool_call_streaming=True,
            structured_output=True,
            open_weights=True,
        )
        own = self._own_engine(self.model)
        limit = self._engine_config.max_model_len if own is None else own.max_model_len
        if limit is not None:
            profile["max_input_tokens"] = limit
        return profile

    def _call(self, messages: list[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any]) -> Chat:
        # `stream` has done its work in LangChain.
        settings = {name: value for name, value in kwargs.items() if name not in ("model", "stream")}
        return Chat.of(self, kwargs.get("model") or self.model, messages, stop, settings)
