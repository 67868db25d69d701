"""`PagedLLM`: LangChain's plain completion model on the engine that this process shares."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Self

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseLLM, LangSmithParams, LanguageModelInput
from langchain_core.outputs import GenerationChunk, LLMResult
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import get_config_list

from langchain_paged.call import Completion, settings_of_call
from langchain_paged.language_model import EngineLanguageModel
from langchain_paged.outputs import AsyncChunks
from langchain_paged.settings import RequestSettings
from paged_backend import AsyncStream


class PagedLLM(EngineLanguageModel, BaseLLM):
    """A model that goes on with a text, in this process, on one paged and continuously batched engine per model.

    It shares that engine with every `ChatPaged` and `PagedLLM` of the same `model` and `engine_kwargs`. The prompt is
    taken as it is: chat templates belong to `ChatPaged`, and messages given here become text such as `Human: ...`.

    Setup:
        ```bash
        pip install 'paged-backend[langchain]'
        ```

    Instantiate:
        ```python
        from langchain_paged import PagedLLM

        model = PagedLLM(model="demo", temperature=0, max_tokens=30)
        ```

    Invoke:
        ```python
        model.invoke("The three primary colours are")
        ```

    Stream:
        ```python
        for text in model.stream("The three primary colours are"):
            print(text, end="")
        ```

    Batch:
        ```python
        model.batch(["The capital of Italy is", "The capital of Peru is"])
        ```

        All prompts are in the engine at once; `config={"max_concurrency": 4}` limits that. With
        `return_exceptions=True`, a prompt that fails takes no other with it.

    Async:
        ```python
        await model.ainvoke("The three primary colours are")
        ```

        Cancelling the task ends its requests.

    Several answers, and more than their text:
        ```python
        result = model.generate(["My favourite season is"], n=3, logprobs=True)
        result.generations[0][2].text, result.generations[0][2].generation_info, result.llm_output["token_usage"]
        ```
    """

    max_tokens: int | None = 256
    """Most tokens to generate. None: what the model's generation_config.json says, else until the model ends the text,
    which many never do."""

    def generate(self, prompts: list[str], stop: list[str] | None = None, *args: Any, **kwargs: Any) -> LLMResult:
        """As LangChain's, but an LLM cache answers only for the same arguments of the call, too."""
        model, kwargs = self._with_settings_of(kwargs)
        return super(PagedLLM, model).generate(prompts, stop, *args, **kwargs)

    async def agenerate(
        self, prompts: list[str], stop: list[str] | None = None, *args: Any, **kwargs: Any
    ) -> LLMResult:
        """`generate` for event loops."""
        model, kwargs = self._with_settings_of(kwargs)
        return await super(PagedLLM, model).agenerate(prompts, stop, *args, **kwargs)

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[str]:
        """Complete all inputs at once, in order; `max_concurrency` in `config` limits how many are in the engine."""
        if _is_one_call(config, len(inputs), return_exceptions):
            return super().batch(inputs, config, **kwargs)
        # BaseLLM's way: slices, each as slow as its slowest prompt, and one error for all prompts of a slice.
        configs = self._all_at_once(config, len(inputs))
        return Runnable.batch(self, inputs, configs, return_exceptions=return_exceptions, **kwargs)

    async def abatch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[str]:
        """`batch` for event loops."""
        if _is_one_call(config, len(inputs), return_exceptions):
            return await super().abatch(inputs, config, **kwargs)
        return await Runnable.abatch(self, inputs, config, return_exceptions=return_exceptions, **kwargs)

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        call = self._call(stop, kwargs)
        llm = self._engine(call.model)
        return call.result(llm.generate(prompts, call.sampling_params(llm), use_tqdm=False, **call.options))

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        call = self._call(stop, kwargs)
        llm = await self._aengine(call.model)
        return call.result(await llm.agenerate(prompts, call.sampling_params(llm), **call.options))

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        call = self._call(stop, kwargs)
        writer = call.chunk_writer()
        llm = self._engine(call.model)
        with llm.stream(prompt, call.sampling_params(llm), **call.options) as outputs:
            for output in outputs:
                for chunk in writer.write(output):
                    if run_manager is not None:  # unlike with chat models, LangChain leaves this to us
                        run_manager.on_llm_new_token(chunk.text, chunk=chunk, verbose=self.verbose)
                    yield chunk

    def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        call = self._call(stop, kwargs)

        async def start() -> AsyncStream:
            llm = await self._aengine(call.model)
            return llm.astream(prompt, call.sampling_params(llm), **call.options)

        async def report(chunk: GenerationChunk) -> None:
            if run_manager is not None:
                await run_manager.on_llm_new_token(chunk.text, chunk=chunk, verbose=self.verbose)

        return AsyncChunks(start, call.chunk_writer(), report)

    @property
    def _llm_type(self) -> str:
        return "paged"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        """Whatever changes the answer, for traces and for the keys of LLM caches."""
        settings = settings_of_call(self, None, {})
        # LangChain puts the call's stop under `stop`, also if there is none, and would hide the field's.
        settings["stop_sequences"] = settings.pop("stop")
        return {**self._engine_identity, **{name: value for name, value in settings.items() if value is not None}}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        own = [self.stop] if isinstance(self.stop, str) else self.stop
        params = super()._get_ls_params(stop=own if stop is None else stop, **kwargs)
        params["ls_provider"] = "paged"
        return params

    def _with_settings_of(self, kwargs: dict[str, Any]) -> tuple[Self, dict[str, Any]]:
        """A copy with the settings among a call's arguments, and the other arguments.

        LangChain's cache keys know the model's fields only, not the arguments of a call.
        """
        known = {*RequestSettings.model_fields, "model"}
        settings = {name: value for name, value in kwargs.items() if name in known}
        rest = {name: value for name, value in kwargs.items() if name not in known}
        return self.model_copy(update=settings), rest

    def _call(self, stop: list[str] | None, kwargs: Mapping[str, Any]) -> Completion:
        settings = {name: value for name, value in kwargs.items() if name != "model"}
        return Completion(kwargs.get("model") or self.model, settings_of_call(self, stop, settings))


def _is_one_call(
    config: RunnableConfig | list[RunnableConfig] | None, num_inputs: int, return_exceptions: bool
) -> bool:
    """Whether all inputs can be one call of the engine, which ends all of them if one fails."""
    limits = [one.get("max_concurrency") for one in get_config_list(config, num_inputs)] if num_inputs else []
    return not return_exceptions and not any(limits)
