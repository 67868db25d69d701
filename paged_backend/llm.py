"""`LLM`: the engine as its users see it."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from tqdm.auto import tqdm

from paged_backend.assembly import assemble, request_builder
from paged_backend.async_stream import AsyncStream, run_off_loop
from paged_backend.backend import Backend, EncoderBackend, load_backend
from paged_backend.beam_search_params import BeamSearchParams
from paged_backend.chat.chat_builder import check_parsers
from paged_backend.chat.messages import Message
from paged_backend.chat.tokenizer import Tokenizer
from paged_backend.config import EngineConfig
from paged_backend.engine.kv_map import KVMap
from paged_backend.engine.loop import EngineLoop, News
from paged_backend.engine.metrics import EngineStats
from paged_backend.engine.outbox import Outbox
from paged_backend.engine.request import Request
from paged_backend.errors import EngineDeadError, InvalidRequestError
from paged_backend.handle import RequestHandle
from paged_backend.lora import LoRARequest
from paged_backend.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PairScoreOutput,
    RequestOutput,
    RerankOutput,
    ScoreOutput,
)
from paged_backend.request_builder import Prompt
from paged_backend.reranking import classified, ranked, vector_of
from paged_backend.sampling_params import SamplingParams
from paged_backend.scoring import scores_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

# Tokenising this many characters takes milliseconds: longer prompts are prepared away from the event loop.
_MANY_CHARACTERS = 20_000


class _SharedLLM:
    """One of the process-wide LLMs, from before it is loaded. Until it is closed, it keeps the objects by whose ids it
    is known."""

    def __init__(self, key_objects: tuple[object, ...]) -> None:
        self.key_objects = key_objects
        self.lock = threading.Lock()
        self.llm: LLM | None = None


class LLM:
    """One model with one paged KV cache, for every thread and every event loop of this process.

    Calls from anywhere share its batches. `close()`, leaving a `with` block or dropping the last reference ends what
    is unfinished and gives the memory back.

    `model` is `"demo"`, a folder, a `.gguf` file, a hub id, or a loaded model, whose weights are used in place;
    `tokenizer` comes with a loaded model, or names another one than the model's own. All other arguments are the fields
    of `EngineConfig`. Raises ConfigError for an impossible setting, ModelError for a model that cannot be loaded or
    served.

    What all requests may be given: `priority` (lower is served first), `cache_salt` (prefixes are shared only within
    the same salt), `timeout` (seconds; RequestTimeoutError when it runs out) and `lora_request` (a LoRARequest; a list
    has one, or None, for each prompt). Requests that can never be served raise InvalidRequestError, and then nothing of
    the call was queued.
    """

    _shared: ClassVar[dict[Any, _SharedLLM]] = {}
    _shared_lock: ClassVar[threading.Lock] = threading.Lock()
    _process_id: ClassVar[int | None] = None

    def __init__(
        self,
        model: str | os.PathLike[str] | PreTrainedModel,
        tokenizer: str | PreTrainedTokenizerBase | None = None,
        **config: Any,
    ) -> None:
        checked = EngineConfig(**config)
        self._start(lambda: load_backend(model, tokenizer, checked), checked)

    @classmethod
    def from_backend(cls, backend: Backend | EncoderBackend, **config: Any) -> Self:
        """An LLM on a runner of your own, which decides over device, type, blocks and lengths; of `config`, what is for
        the scheduler counts."""
        llm = cls.__new__(cls)
        llm._start(lambda: backend, EngineConfig(**config))
        return llm

    @classmethod
    def shared(
        cls,
        model: str | os.PathLike[str] | PreTrainedModel,
        tokenizer: str | PreTrainedTokenizerBase | None = None,
        **config: Any,
    ) -> LLM:
        """The process-wide LLM for this model and configuration: made at the first call, and again after `close()`."""
        shared = cls._shared_slot(model, tokenizer, config)
        with shared.lock:  # one of those who ask at once loads it, the others wait for that
            if shared.llm is None or shared.llm.is_closed:
                shared.llm, shared.key_objects = cls(model, tokenizer, **config), (model, tokenizer)
            return shared.llm

    @classmethod
    async def ashared(
        cls,
        model: str | os.PathLike[str] | PreTrainedModel,
        tokenizer: str | PreTrainedTokenizerBase | None = None,
        **config: Any,
    ) -> LLM:
        """`shared` for event loops: other tasks run while a model is loaded."""
        llm = cls._shared_slot(model, tokenizer, config).llm
        if llm is not None and not llm.is_closed:
            return llm
        return await asyncio.to_thread(cls.shared, model, tokenizer, **config)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **options: Any,
    ) -> list[RequestOutput]:
        """Complete prompts; one output per prompt, in order.

        `sampling_params` may be one for all, or one for each. None takes the model's recommendations, and 16 tokens.
        `use_tqdm` shows a progress bar in a terminal. If one request fails (by its `timeout`, say), its error is raised
        and the others are aborted; `submit` keeps them apart.
        """
        return self._run(self._builder.completions(prompts, sampling_params, final_only=True, **options), use_tqdm)

    async def agenerate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """`generate` for event loops: other tasks run meanwhile; cancelling it aborts its requests."""
        requests = await run_off_loop(
            lambda: self._builder.completions(prompts, sampling_params, final_only=True, **options),
            is_long=_takes_long(prompts, sampling_params),
        )
        return await self._arun(requests)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None, **options: Any) -> RequestHandle:
        """Complete one prompt, output by output as it grows; each holds what is new, or what `output_kind` says."""
        return self.submit(prompt, sampling_params, **options)

    def astream(self, prompt: Prompt, sampling_params: SamplingParams | None = None, **options: Any) -> AsyncStream:
        """`stream` for event loops: `async for output in llm.astream(...)`."""

        async def submit() -> RequestHandle:
            requests = await run_off_loop(
                lambda: self._builder.completions([prompt], sampling_params, **options),
                is_long=_takes_long(prompt, sampling_params),
            )
            return self._submit(requests)[0]

        return AsyncStream(submit)

    def submit(self, prompt: Prompt, sampling_params: SamplingParams | None = None, **options: Any) -> RequestHandle:
        """Queue one prompt and return at once. `request_id` may be given; it must not be in use."""
        return self._submit(self._builder.completions([prompt], sampling_params, **options))[0]

    def submit_all(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[RequestHandle]:
        """Queue several prompts or, if one of them is refused, none; one handle per prompt, in order."""
        return self._submit(self._builder.completions(list(prompts), sampling_params, **options))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several.

        A conversation is a list of `{"role": ..., "content": ...}`. Options besides those of all requests:
        `chat_template`, `add_generation_prompt`, `continue_final_message` (go on with the last message) and
        `chat_template_kwargs`. With `sampling_params=None`, the answer ends where the model ends it.

        `tools`, `tool_choice` (`"auto"`, `"none"`, `"required"` or one by name) and `parallel_tool_calls` are OpenAI's;
        calls come back in `tool_calls`, reasoning in `reasoning`, and neither is in `text`. `tool_call_parser` and
        `reasoning_parser` override the engine's; None leaves all of it in the text.
        """
        return self._run(self._builder.chats(messages, sampling_params, final_only=True, **options), use_tqdm)

    async def achat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """`chat` for event loops: other tasks run meanwhile; cancelling it aborts its requests."""
        requests = await run_off_loop(
            lambda: self._builder.chats(messages, sampling_params, final_only=True, **options),
            is_long=_takes_long(messages, sampling_params, options.get("tools")),
        )
        return await self._arun(requests)

    def stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None, **options: Any
    ) -> RequestHandle:
        """Answer one conversation, output by output as the answer grows; options as for `chat`."""
        return self._submit(self._builder.chats([messages], sampling_params, **options))[0]

    def astream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None, **options: Any
    ) -> AsyncStream:
        """`stream_chat` for event loops: `async for output in llm.astream_chat(...)`."""

        async def submit() -> RequestHandle:
            requests = await run_off_loop(
                lambda: self._builder.chats([messages], sampling_params, **options),
                is_long=_takes_long(messages, sampling_params, options.get("tools")),
            )
            return self._submit(requests)[0]

        return AsyncStream(submit)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams],
        use_tqdm: bool = True,
        **options: Any,
    ) -> list[RequestOutput]:
        """Search for the most likely completions of prompts; one output per prompt, in order.

        Its `outputs` are those of transformers' `generate(num_beams=...)`, sorted by their `score`, best first. The
        beams of a prompt share its blocks in the KV cache, and run in the same steps as all other requests.
        """
        return self._run(self._builder.beams(prompts, params, **options), use_tqdm)

    async def abeam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams],
        **options: Any,
    ) -> list[RequestOutput]:
        """`beam_search` for event loops: other tasks run meanwhile; cancelling it aborts its requests."""
        requests = await run_off_loop(
            lambda: self._builder.beams(prompts, params, **options),
            is_long=_num_characters(prompts) > _MANY_CHARACTERS,
        )
        return await self._arun(requests)

    def score(
        self, prompts: Prompt | Sequence[Prompt], continuations: Any, use_tqdm: bool = True, **options: Any
    ) -> list[list[ScoreOutput]]:
        """How likely given continuations are; per prompt, in order, one `ScoreOutput` for each of its continuations.

        `continuations` has, for each prompt, one continuation or a list of them; for a prompt that is not in a list, it
        is one continuation or a list of them. Each is text or token ids. What the continuations of a prompt, and
        prompts, have in common is computed once. `scoring.pair_of` says where a continuation begins.
        """
        scoring = self._builder.scores(prompts, continuations, **options)
        return scores_of(scoring, self._run(scoring.requests, use_tqdm))

    async def ascore(
        self, prompts: Prompt | Sequence[Prompt], continuations: Any, **options: Any
    ) -> list[list[ScoreOutput]]:
        """`score` for event loops: other tasks run meanwhile; cancelling it aborts its requests."""
        scoring = await run_off_loop(
            lambda: self._builder.scores(prompts, continuations, **options),
            is_long=_num_characters(prompts) + _num_characters(continuations) > _MANY_CHARACTERS,
        )
        return scores_of(scoring, await self._arun(scoring.requests))

    def embed(
        self, prompts: Prompt | Sequence[Prompt], use_tqdm: bool = True, **options: Any
    ) -> list[EmbeddingRequestOutput]:
        """A vector for each prompt, in order: `output.outputs.embedding`, a list of floats.

        Options besides those of all requests: `pooling` (`"last"`, `"mean"` or, for encoders, `"cls"`) and `normalize`
        (scale to length 1); None takes what the model was made for, as far as its files say so, else the mean of an
        encoder's and the last of another model's hidden states, scaled. `dimensions` keeps the first so many components
        only. `truncate_prompt_tokens` cuts longer prompts instead of refusing them; -1 cuts them to the model's limit.
        """
        requests = self._builder.embeddings(prompts, **options)
        return _embeddings(requests, self._run(requests, use_tqdm))

    async def aembed(self, prompts: Prompt | Sequence[Prompt], **options: Any) -> list[EmbeddingRequestOutput]:
        """`embed` for event loops: other tasks run meanwhile; cancelling it aborts its requests."""
        requests = await run_off_loop(
            lambda: self._builder.embeddings(prompts, **options), is_long=_num_characters(prompts) > _MANY_CHARACTERS
        )
        return _embeddings(requests, await self._arun(requests))

    def score_pairs(
        self, text_1: str | Sequence[str], text_2: str | Sequence[str], use_tqdm: bool = True, **options: Any
    ) -> list[PairScoreOutput]:
        """How well pairs of texts fit; one text is paired with each of a list.

        By a model with a head for it (a cross-encoder, or another sequence classifier with one label), the score is
        what the head says of both texts together; by all others, the cosine of the angle between their vectors.
        Options besides those of all requests: `use_activation=False` leaves out the head's sigmoid;
        `truncate_prompt_tokens` is that of `embed` and, for a head, cuts the longer text of a pair.
        """
        scoring = self._builder.pairs(text_1, text_2, **options)
        self._run(scoring.requests, use_tqdm)
        return scoring.outputs()

    async def ascore_pairs(
        self, text_1: str | Sequence[str], text_2: str | Sequence[str], **options: Any
    ) -> list[PairScoreOutput]:
        """`score_pairs` for event loops: other tasks run meanwhile; cancelling it aborts its requests."""
        scoring = await run_off_loop(
            lambda: self._builder.pairs(text_1, text_2, **options),
            is_long=_num_characters(text_1) + _num_characters(text_2) > _MANY_CHARACTERS,
        )
        await self._arun(scoring.requests)
        return scoring.outputs()

    def rerank(
        self, query: str, documents: Sequence[str], top_n: int | None = None, use_tqdm: bool = True, **options: Any
    ) -> list[RerankOutput]:
        """The documents by how well they fit the query, best first, `top_n` at most; options as for `score_pairs`."""
        return ranked(documents, self.score_pairs(query, documents, use_tqdm, **options), top_n)

    async def arerank(
        self, query: str, documents: Sequence[str], top_n: int | None = None, **options: Any
    ) -> list[RerankOutput]:
        """`rerank` for event loops: other tasks run meanwhile; cancelling it aborts its requests."""
        return ranked(documents, await self.ascore_pairs(query, documents, **options), top_n)

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        use_tqdm: bool = True,
        *,
        use_activation: bool = True,
        **options: Any,
    ) -> list[ClassificationOutput]:
        """How well each prompt fits each label of a model with a sequence classification head, in order."""
        requests, support = self._builder.classifications(prompts, **options)
        self._run(requests, use_tqdm)
        return [classified(request, support, use_activation=use_activation) for request in requests]

    async def aclassify(
        self, prompts: Prompt | Sequence[Prompt], *, use_activation: bool = True, **options: Any
    ) -> list[ClassificationOutput]:
        """`classify` for event loops: other tasks run meanwhile; cancelling it aborts its requests."""
        requests, support = await run_off_loop(
            lambda: self._builder.classifications(prompts, **options),
            is_long=_num_characters(prompts) > _MANY_CHARACTERS,
        )
        await self._arun(requests)
        return [classified(request, support, use_activation=use_activation) for request in requests]

    def get_default_sampling_params(self, **overrides: Any) -> SamplingParams:
        """What the model's generation_config.json recommends (temperature, top_p, top_k, min_p, repetition_penalty,
        max_tokens), with `overrides`, which win, also if they are 0."""
        return self._builder.default_sampling_params(**overrides)

    def get_default_chat_params(self, **overrides: Any) -> SamplingParams:
        """The same for chats: without another limit, an answer ends where the model ends it."""
        return self._builder.default_chat_params(**overrides)

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises InvalidRequestError if the model came without one."""
        return self._builder.tokenizer

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The Hugging Face tokenizer itself, as in vLLM."""
        return self.tokenizer.hf_tokenizer

    def encode_chat(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """The prompt's token ids as `chat` sends them; options are those of `chat` that make the prompt."""
        return self._builder.chat_token_ids(messages, **options)

    def stats(self) -> EngineStats:
        """A snapshot of the engine's counters, taken between two steps."""
        return self._loop.call(lambda engine: engine.stats())

    def kv_map(self, max_cells: int = 2048) -> KVMap:
        """Who holds which block of the KV cache, taken between two steps; with more blocks than `max_cells`, several
        of them make a cell."""
        if max_cells < 1:
            raise InvalidRequestError(f"max_cells={max_cells} is out of range: it must be >= 1", field="max_cells")
        return self._loop.call(lambda engine: engine.kv_map(max_cells))

    def reset_prefix_cache(self) -> None:
        """Forget all prefixes in the KV cache; unfinished requests go on, and share nothing with later ones."""
        self._loop.call(lambda engine: engine.reset_prefix_cache())

    def add_lora(self, lora_request: LoRARequest) -> None:
        """Load an adapter before it is asked for; raises InvalidRequestError if it cannot be, or does not fit."""
        self._builder.load_adapter(lora_request)

    def remove_lora(self, lora_name: str) -> bool:
        """Let go of an adapter's weights, once unfinished requests are through with them; False if there are none.
        Naming it again loads it again."""
        return self._builder.remove_adapter(lora_name)

    def list_loras(self) -> list[str]:
        """The names of the adapters that are loaded, the one that was used last at the end."""
        return self._builder.adapter_names()

    @property
    def is_closed(self) -> bool:
        return self._loop.is_closed

    def close(self) -> None:
        """End what is unfinished with EngineDeadError and give the memory back. Closing twice is fine."""
        if not self.is_closed:
            logger.info("closing %s", self.model_name)
        self._loop.close()
        with LLM._shared_lock:
            for shared in LLM._shared.values():
                if shared.llm is self:
                    shared.key_objects = ()  # another object may have their ids from now on: it finds a closed LLM

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, load: Callable[[], Backend | EncoderBackend], config: EngineConfig) -> None:
        self.instance_id = uuid.uuid4().hex
        """Tells this engine from all others, also from those of models with the same name."""
        self._check_process()
        check_parsers(config.tool_call_parser, config.reasoning_parser)
        LLM._process_id = os.getpid()
        self.config = config
        self._loop = EngineLoop(max_num_queued_reqs=config.max_num_queued_reqs)
        facts = self._loop.start(lambda: assemble(load(), config))
        self.model_name, self.max_model_len = facts.name, facts.limits.max_model_len
        self._builder = request_builder(facts, config)

    @classmethod
    def _shared_slot(cls, model: Any, tokenizer: Any, config: dict[str, Any]) -> _SharedLLM:
        """Models and tokenizers that are objects count as equal if they are the same object."""
        cls._check_process()
        parts = (os.fspath(part) if isinstance(part, (str, os.PathLike)) else id(part) for part in (model, tokenizer))
        key = (*parts, EngineConfig(**config))
        with cls._shared_lock:
            return cls._shared.setdefault(key, _SharedLLM((model, tokenizer)))

    @classmethod
    def _check_process(cls) -> None:
        """Torch's thread pool does not survive a fork: work in the child would hang for ever."""
        if LLM._process_id not in (None, os.getpid()):
            raise EngineDeadError(
                f"this process was forked from process {LLM._process_id}, which has used an LLM; torch's threads do "
                "not survive that, so start the process with the method 'spawn' instead"
            )

    def _submit(self, requests: list[Request]) -> list[RequestHandle]:
        # The handles come first: if a Ctrl-C interrupts what follows, dropping them aborts.
        outboxes = [Outbox[News]() for _ in requests]
        handles = [RequestHandle(*pair, self._loop) for pair in zip(requests, outboxes, strict=True)]
        self._loop.submit(requests, outboxes)
        return handles

    def _run(self, requests: list[Request], use_tqdm: bool) -> list[RequestOutput]:
        handles = self._submit(requests)
        try:
            # disable=None: no bar where there is no terminal.
            bar = tqdm(handles, desc="Processed prompts", unit="prompt", disable=None if use_tqdm else True)
            return [handle.result() for handle in bar]
        except BaseException:
            for handle in handles:
                handle.abort()
            raise

    async def _arun(self, requests: list[Request]) -> list[RequestOutput]:
        handles = self._submit(requests)
        try:
            return [await handle.aresult() for handle in handles]
        except BaseException:
            for handle in handles:
                handle.abort()
            raise


def _embeddings(requests: list[Request], outputs: list[RequestOutput]) -> list[EmbeddingRequestOutput]:
    return [_embedding(request, output) for request, output in zip(requests, outputs, strict=True)]


def _embedding(request: Request, output: RequestOutput) -> EmbeddingRequestOutput:
    return EmbeddingRequestOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=request.prompt_token_ids,
        outputs=EmbeddingOutput(vector_of(request)),
        num_cached_tokens=output.num_cached_tokens,
        metrics=output.metrics,
    )


def _takes_long(prompts: Any, sampling_params: Any, tools: Any = None) -> bool:
    """Whether making the requests would keep an event loop waiting."""
    each = sampling_params if isinstance(sampling_params, Sequence) else [sampling_params]
    compiles = any(getattr(params, "structured_outputs", None) is not None for params in each)
    return compiles or bool(tools) or _num_characters(prompts) > _MANY_CHARACTERS


def _num_characters(value: Any) -> int:
    """About how much text there is to tokenise."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_num_characters, value.values()))
    if isinstance(value, Sequence) and not (value and isinstance(value[0], int)):
        return sum(map(_num_characters, value))
    return 0
