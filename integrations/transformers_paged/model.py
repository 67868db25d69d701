"""`enable` and `disable`: a loaded model's `generate`, on an engine that shares its weights."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from types import TracebackType
from typing import Any, Literal, get_args

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from paged_backend import LLM, ConfigError, EngineDeadError, ModelError
from transformers_paged.beams import beam_search_params, search
from transformers_paged.call import Arguments, Call, HandedOver, understand
from transformers_paged.decoding import decode
from transformers_paged.rows import sampling_params
from transformers_paged.weights import Change, Watch, has_adapters

logger = logging.getLogger(__name__)

OnUnsupported = Literal["fallback", "error"]


class PagedModel:
    """A model whose `generate` runs on an engine; leaving its `with` block disables that again.

    >>> with enable(model, tokenizer):
    ...     model.generate(**inputs)
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    @property
    def llm(self) -> LLM:
        """The engine, as it is now: it is made anew if the model has been given other tensors."""
        now = _replacement(self.model)
        if now is None:
            raise EngineDeadError("the model has been disabled; enable() it again")
        return now.engine(self.model)

    def __enter__(self) -> PreTrainedModel:
        return self.model

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        disable(self.model)


def enable(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    on_unsupported: OnUnsupported = "fallback",
    **engine: Any,
) -> PagedModel:
    """Let `model.generate`, and with it every pipeline of the model, run on an engine; other calls stay as they are.

    The engine is `LLM.shared(model, tokenizer, **engine)`: other frameworks that are given the same objects share it.
    It uses the model's weights in place. A call for what the engine cannot do runs on the model's own `generate`, with
    one warning for each reason, or raises NotImplementedError if `on_unsupported="error"`.

    Enabling again replaces these settings. Raises ModelError for a model that the engine cannot serve, ConfigError for
    an impossible setting.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"enable() takes a loaded PreTrainedModel, not a {type(model).__name__}")
    if on_unsupported not in get_args(OnUnsupported):
        raise ConfigError(f"on_unsupported={on_unsupported!r} must be one of {', '.join(get_args(OnUnsupported))}")
    now = _replacement(model)
    if now is not None and now.settings != (tokenizer, on_unsupported, engine):
        disable(model)
        now = None
    if now is None:
        now = PagedGenerate(model, tokenizer, on_unsupported, engine)
        now.engine(model)
        model.generate = now
    return PagedModel(model)


def disable(model: PreTrainedModel) -> None:
    """Undo `enable`; the engine is closed unless somebody is using it. A model that is not enabled stays as it is."""
    now = _replacement(model)
    if now is None:
        return
    del model.__dict__["generate"]
    model.__dict__.update(now.replaced)
    now.release()


def enabled(model: PreTrainedModel) -> PagedModel | None:
    """What `enable` returned, or None for a model that is not enabled."""
    return None if _replacement(model) is None else PagedModel(model)


def _replacement(model: PreTrainedModel) -> PagedGenerate | None:
    generate = model.__dict__.get("generate")
    return generate if isinstance(generate, PagedGenerate) else None


class PagedGenerate:
    """What `enable` puts in the place of a model's `generate`.

    A copy of the model, by `copy` or `pickle`, has its own `generate` as if nothing had been enabled.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        on_unsupported: OnUnsupported,
        engine: dict[str, Any],
    ) -> None:
        self.settings = (tokenizer, on_unsupported, engine)
        self.replaced = {name: value for name, value in model.__dict__.items() if name == "generate"}
        """What the model itself had under that name, besides its class."""
        self._model = weakref.ref(model)
        self._lock = threading.Lock()
        self._own_lock = threading.RLock()
        self._llm: LLM | None = None
        self._room = 0
        """Most tokens of a prompt and its output together."""
        self._watch = Watch()
        self._warned: set[str] = set()

    def __call__(
        self,
        inputs: Any = None,
        generation_config: Any = None,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        prefix_allowed_tokens_fn: Any = None,
        synced_gpus: Any = None,
        assistant_model: Any = None,
        streamer: Any = None,
        negative_prompt_ids: Any = None,
        negative_prompt_attention_mask: Any = None,
        custom_generate: Any = None,
        **kwargs: Any,
    ) -> Any:
        """As transformers' `generate`; where the engine cannot do what is asked, transformers' `generate` itself."""
        arguments = Arguments(
            inputs=inputs,
            generation_config=generation_config,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
            synced_gpus=synced_gpus,
            assistant_model=assistant_model,
            streamer=streamer,
            negative_prompt_ids=negative_prompt_ids,
            negative_prompt_attention_mask=negative_prompt_attention_mask,
            custom_generate=custom_generate,
            kwargs=kwargs,
        )
        model = self._model()
        assert model is not None, "the model is gone, but its generate is not"
        try:
            return self._run(model, arguments)
        except BaseException:
            if streamer is not None:
                streamer.end()  # else its reader would wait for ever
            raise

    def engine(self, model: PreTrainedModel) -> LLM:
        """An engine on the model as it is now, with nothing in its prefix cache that older weights computed."""
        with self._lock:
            tokenizer, _, config = self.settings
            change = self._watch.look(model)
            if change is Change.STRUCTURE:
                self._close()
            if self._llm is None or self._llm.is_closed:
                self._llm = LLM.shared(model, tokenizer, **config)
                self._room = self._llm.stats().max_sequence_len
            if change is not Change.NOTHING:
                self._llm.reset_prefix_cache()  # others may have used it before
            return self._llm

    def release(self) -> None:
        """Close the engine, unless it is at work for somebody."""
        self._watch.close()
        with self._lock, contextlib.suppress(EngineDeadError):
            stats = self._llm.stats() if self._llm is not None else None
            if stats is not None and stats.num_running == stats.num_waiting == 0:
                self._close()

    def __reduce__(self) -> tuple[Any, ...]:
        model = self._model()
        return (_same, (self.replaced["generate"],)) if self.replaced else (getattr, (model, "generate"))

    def _close(self) -> None:
        if self._llm is not None:
            self._llm.close()
        self._llm = None

    def _run(self, model: PreTrainedModel, arguments: Arguments) -> Any:
        try:
            with torch.no_grad():
                return self._generate(model, arguments)
        except HandedOver as reason:
            self._note(model, str(reason))
        own = self.replaced.get("generate") or type(model).generate.__get__(model)
        given = {name: getattr(arguments, name) for name in arguments.__slots__ if name != "kwargs"}
        with self._own_lock:  # however many threads there are: each call takes memory for its own cache
            return own(**given, **arguments.kwargs)

    def _generate(self, model: PreTrainedModel, arguments: Arguments) -> Any:
        if model.training:
            raise HandedOver("the model is in training mode; call model.eval() first")
        if has_adapters(model):
            raise HandedOver("the model has PEFT adapters, whose switches the engine cannot see; merge them first")
        call = understand(model, arguments)
        if (call.config.num_beams or 1) > 1:
            beams = beam_search_params(model, call)
            return search(self._engine_for(model, call), call, beams)
        llm = self._engine_for(model, call)
        params, rows = sampling_params(model, call)
        if call.streamer is not None:
            call.streamer.put(call.input_ids.cpu())
        output = decode(llm, call, params, rows)
        if call.streamer is not None:
            call.streamer.end()
        return output

    def _engine_for(self, model: PreTrainedModel, call: Call) -> LLM:
        try:
            llm = self.engine(model)
        except ModelError as error:  # the model was changed since it was enabled
            raise HandedOver(str(error)) from error
        longest = int(call.mask.count_nonzero(dim=1).max()) + call.max_new_tokens
        if longest > self._room:
            raise HandedOver(
                f"prompt and output may take more than the {self._room} tokens that the engine has room for; "
                "lower max_new_tokens"
            )
        return llm

    def _note(self, model: PreTrainedModel, reason: str) -> None:
        own = f"{type(model).__name__}.generate"
        if self.settings[1] == "error":
            raise NotImplementedError(f"{reason}; with on_unsupported='fallback', {own} would run this call")
        if reason not in self._warned:
            self._warned.add(reason)
            logger.warning("%s runs this call: %s", own, reason)


def _same(value: Any) -> Any:
    return value
