"""Objects of a pydantic class: the model cannot but write JSON that follows the class's schema."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, closing
from typing import Any, Generic, TypeAlias

from llama_index.core import instrumentation
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, TextBlock
from llama_index.core.bridge.pydantic import ValidationError
from llama_index.core.instrumentation.events.llm import LLMStructuredPredictEndEvent, LLMStructuredPredictStartEvent
from llama_index.core.llms.llm import LLM
from llama_index.core.output_parsers.pydantic import PydanticOutputParser
from llama_index.core.program.utils import FlexibleModel, create_flexible_model, get_program_for_llm
from llama_index.core.prompts.base import BasePromptTemplate, PromptTemplate
from llama_index.core.types import BasePydanticProgram, Model, PydanticProgramMode
from pydantic_core import from_json

from paged_backend import StructuredOutputsParams

dispatcher = instrumentation.get_dispatcher(__name__)  # type: ignore[attr-defined]

Partial: TypeAlias = Model | FlexibleModel


class GrammarProgram(BasePydanticProgram[Model], Generic[Model]):
    """Asks for an object of `output_cls`, whose schema is told to the model and enforced by a grammar.

    Streams give what there is of the object: a `FlexibleModel` with the fields that have begun, then objects of
    `output_cls` as soon as all required fields are there. The last one is the whole object. Raises ValueError if the
    answer was cut off, or if the class's own validators refuse it.
    """

    def __init__(self, output_cls: type[Model], llm: LLM, prompt: BasePromptTemplate) -> None:
        self._output_cls = output_cls
        self._llm = llm
        self._prompt = prompt

    @property
    def output_cls(self) -> type[Model]:
        return self._output_cls

    def __call__(self, *args: Any, llm_kwargs: dict[str, Any] | None = None, **prompt_args: Any) -> Model:
        return self._whole(self._llm.chat(self._messages(prompt_args), **self._with_schema(llm_kwargs)))

    async def acall(self, *args: Any, llm_kwargs: dict[str, Any] | None = None, **prompt_args: Any) -> Model:
        return self._whole(await self._llm.achat(self._messages(prompt_args), **self._with_schema(llm_kwargs)))

    def stream_call(
        self, *args: Any, llm_kwargs: dict[str, Any] | None = None, **prompt_args: Any
    ) -> Generator[Partial[Model], None, None]:
        partials = _Partials(self._output_cls)
        with closing(self._llm.stream_chat(self._messages(prompt_args), **self._with_schema(llm_kwargs))) as responses:
            for response in responses:
                yield from partials.add(response)
        yield self._whole(response)

    async def astream_call(
        self, *args: Any, llm_kwargs: dict[str, Any] | None = None, **prompt_args: Any
    ) -> AsyncGenerator[Partial[Model], None]:
        messages, arguments = self._messages(prompt_args), self._with_schema(llm_kwargs)

        async def objects() -> AsyncGenerator[Partial[Model], None]:
            partials = _Partials(self._output_cls)
            async with aclosing(await self._llm.astream_chat(messages, **arguments)) as responses:
                async for response in responses:
                    for partial in partials.add(response):
                        yield partial
            yield self._whole(response)

        return objects()

    def _messages(self, prompt_args: dict[str, Any]) -> list[ChatMessage]:
        """With the schema at the end: a grammar holds the model to it, but the model cannot read grammars."""
        messages = self._llm._extend_messages(self._prompt.format_messages(llm=self._llm, **prompt_args))
        if not messages:
            return messages
        *others, last = messages
        schema = PydanticOutputParser(self._output_cls).get_format_string(escape_json=False)
        return [*others, last.model_copy(update={"blocks": [*last.blocks, TextBlock(text=schema)]})]

    def _with_schema(self, llm_kwargs: dict[str, Any] | None) -> dict[str, Any]:
        return {**(llm_kwargs or {}), "structured_outputs": StructuredOutputsParams(json=self._output_cls)}

    def _whole(self, response: ChatResponse) -> Model:
        raw, text = response.raw, response.message.content or ""
        if isinstance(raw, dict) and raw["finish_reason"] != "stop":
            raise ValueError(
                f"the answer ended by {raw['finish_reason']!r} before its {self._output_cls.__name__} was complete; "
                f"raise max_tokens, or the context. It ends with {text[-80:]!r}"
            )
        return self._output_cls.model_validate_json(text)


class _Partials(Generic[Model]):
    """The objects that the beginnings of one JSON text stand for, each only once."""

    def __init__(self, output_cls: type[Model]) -> None:
        self._output_cls = output_cls
        self._flexible_cls = create_flexible_model(output_cls)
        self._last: Any = None

    def add(self, response: ChatResponse) -> Generator[Partial[Model], None, None]:
        try:
            found = from_json(response.message.content or "", allow_partial="trailing-strings")
        except ValueError:  # not even a bracket
            return
        if found != self._last and response.raw["finish_reason"] is None:  # type: ignore[index]
            self._last = found
            yield self._object(found)

    def _object(self, found: Any) -> Partial[Model]:
        for cls in (self._output_cls, self._flexible_cls):
            try:
                return cls.model_validate(found)
            except ValidationError:
                continue
        return self._flexible_cls()


class StructuredPredictions(LLM):
    """LlamaIndex's four structured predictions, by a grammar unless `pydantic_program_mode` names another way."""

    def structured_predict(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        """An object of `output_cls`; the model can write nothing else."""
        dispatcher.event(
            LLMStructuredPredictStartEvent(output_cls=output_cls, template=prompt, template_args=prompt_args)
        )
        result = self._program(output_cls, prompt)(llm_kwargs=llm_kwargs, **prompt_args)
        assert not isinstance(result, list)
        dispatcher.event(LLMStructuredPredictEndEvent(output=result))
        return result

    async def astructured_predict(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        """`structured_predict` for event loops."""
        dispatcher.event(
            LLMStructuredPredictStartEvent(output_cls=output_cls, template=prompt, template_args=prompt_args)
        )
        result = await self._program(output_cls, prompt).acall(llm_kwargs=llm_kwargs, **prompt_args)
        assert not isinstance(result, list)
        dispatcher.event(LLMStructuredPredictEndEvent(output=result))
        return result

    def _structured_stream_call(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Generator[Any, None, None]:
        """What `stream_structured_predict` gives."""
        return self._program(output_cls, prompt).stream_call(llm_kwargs=llm_kwargs, **prompt_args)

    async def _structured_astream_call(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> AsyncGenerator[Any, None]:
        """What `astream_structured_predict` gives."""
        return await self._program(output_cls, prompt).astream_call(llm_kwargs=llm_kwargs, **prompt_args)

    def _program(self, output_cls: type[Model], prompt: BasePromptTemplate) -> BasePydanticProgram[Model]:
        if self.pydantic_program_mode is PydanticProgramMode.DEFAULT:
            return GrammarProgram(output_cls, self, prompt)
        return get_program_for_llm(output_cls, prompt, self, pydantic_program_mode=self.pydantic_program_mode)
