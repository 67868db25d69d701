"""An engine without a model: a runner that keeps token ids where the real one keeps keys and values."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from paged_backend import Backend, CompletionOutput, EngineStats, SamplingParams, SpeculativeConfig
from paged_backend.engine import request as engine_request
from paged_backend.engine.engine import Engine, EngineOutput
from paged_backend.engine.kv_cache_manager import KVCacheManager
from paged_backend.engine.kv_layout import EVERYTHING, Reach
from paged_backend.engine.output_processor import OutputProcessor, RawLogprobs, TextDecoder
from paged_backend.engine.request import Request
from paged_backend.engine.scheduler import OutOfDeviceMemoryError, ScheduledSequence, Scheduler, SchedulerOutput
from paged_backend.engine.speculation import Speculator

VOCAB_SIZE = 1000
WAIT_SECONDS = 20.0
REQUEST_OPTIONS = (
    *("eos_token_ids", "priority", "cache_salt", "deadline", "final_only", "pooling", "prompt_logprobs_start"),
    "beam_params",
)

_request_numbers = itertools.count()


class StepFailure(Exception):
    """What a step dies of when a test wants it to."""


Slot = tuple[int, int] | None
"""(group, token id)"""


class FakeRunner:
    """Keeps token ids in its slots, and whose group of layers they are for. What a sequence would attend to in any of
    them must be its own tokens, in order, at every step.

    Its logits row for a token is the context up to and with that token.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        vocab_size: int = VOCAB_SIZE,
        num_swap_blocks: int = 0,
        reaches: Sequence[Reach] = (EVERYTHING,),
    ) -> None:
        self.reaches = reaches
        self.vocab_size = vocab_size
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.slots: list[list[Slot]] = [[None] * block_size for _ in range(num_blocks)]
        self.swapped: list[list[Slot]] = [[None] * block_size for _ in range(num_swap_blocks)]
        self.num_steps = 0
        self.num_tokens = 0
        """Computed in all steps that did not fail."""
        self.on_step: Callable[[SchedulerOutput], object] = lambda output: None
        """Called in each step once its slots are written, as if it were the model: it may raise, or wait."""

    def execute(self, output: SchedulerOutput) -> list[list[int]]:
        self.num_steps += 1
        for source, target in output.swaps.outs:
            self.swapped[target] = list(self.slots[source])
        copied = [list(self.slots[copy.source]) for copy in output.copies]
        for copy, content in zip(output.copies, copied, strict=True):
            self.slots[copy.target] = content
        for source, target in output.swaps.ins:
            self.slots[target] = list(self.swapped[source])
        try:
            self.on_step(output)
        except BaseException as error:
            for item in output.scheduled:
                self._store(item, lambda token_id: None)  # garbage: the model did not get to the end
            for copy in (*output.copies, *output.swaps.ins):
                self.slots[copy.target] = [None] * self.block_size
            if not isinstance(error, OutOfDeviceMemoryError):
                for _, target in output.swaps.outs:
                    self.swapped[target] = [None] * self.block_size
            raise
        self.num_tokens += output.num_tokens

        def known(token_id: int) -> int:
            return token_id if token_id >= 0 else int(output.pending_tokens[-1 - token_id])

        for item in output.scheduled:
            self._store(item, known)
        return [row for item in output.scheduled for row in self._rows_of(item, known)]

    def rows(self, logits: list[list[int]], rows: list[int]) -> list[list[int]]:
        return [logits[row] for row in rows]

    def _store(self, item: ScheduledSequence, content: Callable[[int], int | None]) -> None:
        sequence = item.sequence
        for group, table in enumerate(sequence.tables):
            for position, token_id in enumerate(item.token_ids, start=sequence.num_computed_tokens):
                block = table.blocks[position // self.block_size]
                stored = content(token_id)
                self.slots[block][position % self.block_size] = None if stored is None else (group, stored)

    def _rows_of(self, item: ScheduledSequence, known: Callable[[int], int]) -> list[list[int]]:
        sequence, num_tokens, num_logits = item
        end = sequence.num_computed_tokens + num_tokens
        context = sequence.token_ids[: sequence.num_computed_tokens] + list(map(known, item.token_ids))
        assert len(context) == end and len(sequence.tables) == len(self.reaches)
        for group, (table, reach) in enumerate(zip(sequence.tables, self.reaches, strict=True)):
            first = reach.first_visible(sequence.num_computed_tokens)
            slots = [slot for block in table.blocks for slot in self.slots[block]][first:end]
            assert slots == [(group, token_id) for token_id in context[first:]], f"{sequence} would attend to {slots}"
        return [context[: end - num_logits + 1 + i] for i in range(num_logits)]


class FakeToken(NamedTuple):
    token_id: int
    logprobs: RawLogprobs | None
    is_complete: bool = False


class FakeDraws:
    """Tokens that nobody may look at before `result` is asked for, but for the runner."""

    def __init__(self, drawn: list[FakeToken]) -> None:
        self.tokens = [token.token_id for token in drawn]
        self._drawn = drawn

    def result(self) -> list[FakeToken]:
        return self._drawn


class FakeSampler:
    """The next token depends on all that a real one may depend on: context, seed, position, what is prompt and what
    is output. With `extra_args={"forced": ids}`, it is the next of these ids."""

    def __init__(self, vocab_size: int = VOCAB_SIZE) -> None:
        self._vocab_size = vocab_size

    def sample(self, logits: list[list[int]], sequences: list[engine_request.Sequence]) -> list[FakeToken]:
        return [self._sample(context, sequence) for context, sequence in zip(logits, sequences, strict=True)]

    def start(self, logits: list[list[int]], sequences: list[engine_request.Sequence]) -> FakeDraws | None:
        """`extra_args={"needs_tokens": True}` says that tokens have to be known."""
        if any((sequence.request.params.extra_args or {}).get("needs_tokens") for sequence in sequences):
            return None
        return FakeDraws(self.sample(logits, sequences))

    def prompt_logprobs(self, logits: list[list[int]], token_ids: list[int], num_logprobs: int) -> list[RawLogprobs]:
        return [{token_id: logprob_of(context, token_id)} for context, token_id in zip(logits, token_ids, strict=True)]

    def candidates(
        self, logits: list[list[int]], sequences: list[engine_request.Sequence], nums: list[int]
    ) -> list[list[tuple[int, float]]]:
        return [best_of(context)[:num] for context, num in zip(logits, nums, strict=True)]

    def _sample(self, context: list[int], sequence: engine_request.Sequence) -> FakeToken:
        params = sequence.request.params
        forced = (params.extra_args or {}).get("forced")
        if forced is not None:
            token_id = forced[sequence.num_drawn_tokens - sequence.num_prompt_tokens]
        else:
            seed = 0 if params.is_greedy else sequence.seed
            token_id = hash((seed, sequence.num_prompt_tokens, *context)) % self._vocab_size
        return FakeToken(token_id, None if params.logprobs is None else {token_id: logprob_of(context, token_id)})


def logprob_of(context: Sequence[int], token_id: int) -> tuple[float, int]:
    """The fake model's log-probability and rank of a token after a context."""
    return -(hash((token_id, *context)) % 1000) / 100, 1


def best_of(context: Sequence[int]) -> list[tuple[int, float]]:
    """The fake model's tokens 0 to 9 with their log-probabilities after a context, best first."""
    of_token = {token_id: logprob_of(context, token_id)[0] for token_id in range(10)}
    return sorted(of_token.items(), key=lambda item: -item[1])


def make_request(prompt: Iterable[int] = range(1, 6), request_id: str | None = None, **options: Any) -> Request:
    """Options are `REQUEST_OPTIONS` and sampling parameters."""
    of_request = {name: options.pop(name) for name in REQUEST_OPTIONS if name in options}
    params = SamplingParams(**{"max_tokens": 8, "seed": 7} | options)
    assert params.max_tokens is not None and params.seed is not None
    return Request(
        request_id=request_id or f"request-{next(_request_numbers)}",
        prompt_token_ids=list(prompt),
        params=params,
        max_tokens=params.max_tokens,
        seed=params.seed,
        **of_request,
    )


def make_manager(
    *, num_blocks: int = 64, block_size: int = 4, enable_prefix_caching: bool = True, **options: Any
) -> KVCacheManager:
    return KVCacheManager(num_blocks, block_size, enable_prefix_caching=enable_prefix_caching, **options)


def make_scheduler(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 256,
    enable_prefix_caching: bool = True,
    speculation: SpeculativeConfig | None = None,
    **of_manager: Any,
) -> Scheduler:
    return Scheduler(
        make_manager(
            num_blocks=num_blocks,
            block_size=block_size,
            enable_prefix_caching=enable_prefix_caching,
            max_step_tokens=max_num_batched_tokens,
            **of_manager,
        ),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        speculator=None if speculation is None else Speculator(speculation),
    )


class EngineUnderTest:
    """An engine on fakes, what it was built from, and the news of its requests so far."""

    def __init__(self, decoder: TextDecoder | None = None, *, is_asynchronous: bool = False, **options: Any) -> None:
        self.scheduler = make_scheduler(**options)
        manager = self.scheduler.kv_cache_manager
        self.runner = FakeRunner(
            num_blocks=manager.pool.num_blocks,
            block_size=manager.block_size,
            num_swap_blocks=manager.swap_pool.num_blocks,
            reaches=manager.layout.reaches,
        )
        self.engine = Engine(
            *(self.runner, FakeSampler(), self.scheduler, OutputProcessor(decoder)), is_asynchronous=is_asynchronous
        )
        self.news: dict[str, list[CompletionOutput | Exception]] = {}
        self.requests: dict[str, Request] = {}

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.requests[request.request_id] = request
            self.news[request.request_id] = []
            self.engine.add_request(request)

    def step(self) -> None:
        self._note(self.engine.step())
        check_blocks(self.scheduler)

    def failing_step(self) -> None:
        """A step whose model raises StepFailure."""

        def fail(output: SchedulerOutput) -> None:
            raise StepFailure("on purpose")

        self.runner.on_step, on_step = fail, self.runner.on_step
        try:
            self.step()
        finally:
            self.runner.on_step = on_step

    def step_without_memory(self, num_tokens: int) -> None:
        """A step that finds memory for so many tokens only."""

        def run_out(output: SchedulerOutput) -> None:
            if output.num_tokens > num_tokens:
                raise OutOfDeviceMemoryError("on purpose")

        self.runner.on_step, on_step = run_out, self.runner.on_step
        try:
            self.step()
        finally:
            self.runner.on_step = on_step

    def abort(self, request_id: str) -> None:
        self._note(self.engine.abort(request_id))
        check_blocks(self.scheduler)

    def run(self, *requests: Request, max_steps: int = 5000) -> list[Result]:
        """Add requests and step until nothing is left to do; the results of these requests."""
        self.add(*requests)
        for _ in range(max_steps):
            if not self.engine.has_work:
                return [self.result(request.request_id) for request in requests]
            self.step()
        raise AssertionError(f"still working after {max_steps} steps")

    def result(self, request_id: str) -> Result:
        """What the reader of a request has got so far."""
        request, news = self.requests[request_id], self.news[request_id]
        errors = [item for item in news if isinstance(item, Exception)]
        pieces = [
            [item for item in news if not isinstance(item, Exception) and item.index == i] for i in _indices(request)
        ]
        return Result(list(map(joined, pieces)), errors[0] if errors else None, request.prompt_logprobs)

    def _note(self, outputs: list[EngineOutput]) -> None:
        for request, news in outputs:
            received = self.news[request.request_id]
            assert not any(isinstance(item, Exception) for item in received), "news after an error"
            if isinstance(news, CompletionOutput):
                same = [item for item in received if isinstance(item, CompletionOutput) and item.index == news.index]
                assert not (same and same[-1].finished()), "news after the end"
            received.append(news)


class Result(NamedTuple):
    """All that a request's reader got, joined."""

    outputs: list[CompletionOutput]
    error: Exception | None
    prompt_logprobs: list[Any] | None

    @property
    def token_ids(self) -> list[int]:
        """Of the only, or first, sample."""
        return self.outputs[0].token_ids

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def finish_reason(self) -> str | None:
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        return self.outputs[0].stop_reason


def make_engine(decoder: TextDecoder | None = None, **options: Any) -> EngineUnderTest:
    """Options are `is_asynchronous` and those of `make_scheduler`."""
    return EngineUnderTest(decoder, **options)


def make_llm(
    *, num_blocks: int = 64, max_model_len: int = 256, eos_token_ids: Iterable[int] = (), **config: Any
) -> Any:
    """An `LLM` on fakes; `tokenizer` may be given, as may `runner`. Other options are those of `EngineConfig`."""
    from paged_backend import LLM

    tokenizer, runner = config.pop("tokenizer", None), config.pop("runner", None)
    config = {"block_size": 4, "max_num_batched_tokens": 64} | config
    if runner is None:
        runner = FakeRunner(num_blocks=num_blocks, block_size=config["block_size"])
    backend = Backend(
        name="fake",
        runner=runner,
        sampler=FakeSampler(runner.vocab_size),
        tokenizer=tokenizer,
        max_model_len=max_model_len,
        eos_token_ids=frozenset(eos_token_ids),
        takes_pending_tokens=True,
    )
    return LLM.from_backend(backend, **config)


def joined(pieces: Sequence[CompletionOutput]) -> CompletionOutput:
    """The pieces of one sample as one."""
    logprobs = [entry for piece in pieces for entry in piece.logprobs or ()]
    return CompletionOutput(
        index=pieces[0].index if pieces else 0,
        text="".join(piece.text for piece in pieces),
        token_ids=[token_id for piece in pieces for token_id in piece.token_ids],
        cumulative_logprob=pieces[-1].cumulative_logprob if pieces else None,
        logprobs=logprobs if pieces and pieces[0].logprobs is not None else None,
        finish_reason=pieces[-1].finish_reason if pieces else None,
        stop_reason=pieces[-1].stop_reason if pieces else None,
        score=pieces[-1].score if pieces else None,
    )


def check_blocks(scheduler: Scheduler) -> None:
    """Every block is held exactly as often as it is in a running sequence's table, and everything else is free; host
    memory is held by who waits."""
    pool, swap_pool = scheduler.kv_cache_manager.pool, scheduler.kv_cache_manager.swap_pool
    holders = Counter(block for sequence in scheduler.running for block in sequence.held_blocks)
    assert not any(sequence.swapped for sequence in scheduler.running)
    swapped = [block for one in scheduler.waiting if one.swapped is not None for block in one.swapped.blocks]
    assert all(swap_pool.ref_count(block) == 1 for block in swapped) and len(set(swapped)) == len(swapped)
    assert swap_pool.num_used >= len(swapped), "beams that were set aside have some too"
    assert not any(sequence.tables for sequence in scheduler.waiting)
    assert {block: pool.ref_count(block) for block in range(pool.num_blocks) if pool.ref_count(block)} == holders
    assert pool.num_used == len(holders)
    findable = list(pool.findable())
    assert len(set(findable)) == len(findable), "no block can be found by others' tokens"
    assert pool.num_used + pool.num_free == pool.num_blocks
    assert scheduler.kv_cache_manager.num_unused_slots(scheduler.running) == _num_unused_slots(scheduler)


def _num_unused_slots(scheduler: Scheduler) -> int:
    """Block by block."""
    size = scheduler.kv_cache_manager.block_size
    nums_filled: Counter[int] = Counter()
    for sequence in scheduler.running:
        for table in sequence.tables:
            for index, block in enumerate(table.held, table.num_dropped):
                num_filled = min(max(sequence.num_computed_tokens - index * size, 0), size)
                nums_filled[block] = max(nums_filled[block], num_filled)
    return sum(size - num_filled for num_filled in nums_filled.values())


def is_idle(stats: EngineStats) -> bool:
    """Nothing runs, nothing waits, and every block is free, also in host memory."""
    num_free = (stats.num_free_blocks, stats.num_free_swap_blocks)
    return (stats.num_running, stats.num_waiting, *num_free) == (0, 0, stats.num_blocks, stats.num_swap_blocks)


def num_ended(stats: EngineStats) -> int:
    """Requests that came to an end of their own."""
    return sum(num for reason, num in stats.finished.items() if reason != "abort")


def is_given_up(stats: EngineStats) -> bool:
    """Nothing runs or waits, since all was aborted: what is left alone comes to its end, and is idle, as well."""
    return is_idle(stats) and num_ended(stats) == 0


def wait_until(condition: Callable[[], bool], seconds: float = WAIT_SECONDS) -> None:
    """Look again and again; an error if it does not become true."""
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"still not true after {seconds} s"
        pause.wait(0.002)


def in_threads(*functions: Callable[[], Any]) -> list[Any]:
    """Run functions at the same time; their results, or the first of their errors."""
    results: list[Any] = [None] * len(functions)
    errors: list[BaseException] = []

    def call(index: int) -> None:
        try:
            results[index] = functions[index]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(index,), daemon=True) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive(), "a thread waits for ever"
    if errors:
        raise errors[0]
    return results


def byte_level_tokenizer(*pieces: bytes | str) -> Tokenizer:
    """As in GPT-2 and most models since: ids 0 to 255 are the bytes, then come the pieces, then `<end>`."""
    alphabet = byte_alphabet()
    spelled = [alphabet[byte] for byte in range(256)]
    for piece in pieces:
        spelled.append("".join(alphabet[byte] for byte in (piece.encode() if isinstance(piece, str) else piece)))
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(spelled)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return tokenizer


def byte_alphabet() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    codes = {byte: byte for byte in printable} | {byte: 256 + i for i, byte in enumerate(others)}
    return [chr(codes[byte]) for byte in range(256)]


def byte_fallback_tokenizer(*pieces: str) -> Tokenizer:
    """As in Llama 2: ids 0 to 255 are bytes for what the pieces lack; a blank is written as `▁`."""
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), *(piece.replace(" ", "▁") for piece in pieces)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def metaspace_tokenizer(*pieces: str) -> Tokenizer:
    """As in T5: a blank is written as `▁`, and the first one of a text is dropped."""
    tokens = {piece.replace(" ", "▁"): i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(tokens, []))
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def text_decoder(tokenizer: Tokenizer) -> TextDecoder:
    return TextDecoder(tokenizer.decode, lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)))


def _indices(request: Request) -> range:
    return range(request.params.n)
