"""Speculative tokens: what readers see and what the cache holds does not depend on them, only the number of steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import NoRepeatNGramLogitsProcessor

from helpers import (
    EngineUnderTest,
    FakeRunner,
    byte_level_tokenizer,
    is_idle,
    make_engine,
    make_llm,
    make_request,
    text_decoder,
)
from helpers_crowd import LAYOUTS
from helpers_models import make_model
from paged_backend import (
    LLM,
    ConfigError,
    EngineConfig,
    EngineError,
    RepetitionDetection,
    SamplingParams,
    SpeculativeConfig,
)
from paged_backend.engine.block_pool import BlockKey
from paged_backend.engine.engine import Engine
from paged_backend.engine.kv_layout import Reach
from paged_backend.engine.ngram import NgramIndex
from paged_backend.engine.output_processor import OutputProcessor
from paged_backend.engine.request import Request
from paged_backend.engine.scheduler import SchedulerOutput
from paged_backend.engine.speculation import Drafter, Speculator
from paged_backend.sampling.sampler import Sampler

MAX_LEN = 40
SPECULATION = SpeculativeConfig(num_speculative_tokens=5, prompt_lookup_max=3, prompt_lookup_min=1)


class LogitsRunner(FakeRunner):
    """A fake model of few tokens: its logits are a function of the last two of the context, which it reads from its
    slots. So it repeats itself, and the real sampler has something to choose from."""

    def __init__(self, *, vocab_size: int, scale: float = 3.0, **options: Any) -> None:
        super().__init__(vocab_size=vocab_size, **options)
        generator = torch.Generator().manual_seed(1)
        self._table = torch.randn(vocab_size, vocab_size, vocab_size, generator=generator) * scale

    def execute(self, output: SchedulerOutput) -> Any:
        contexts = super().execute(output)
        rows = [self._table[(context[-2] if len(context) > 1 else 0), context[-1]] for context in contexts]
        return torch.stack(rows) if rows else torch.empty(0, self.vocab_size)

    def rows(self, logits: Any, rows: list[int]) -> Any:
        return logits if rows == list(range(len(logits))) else logits[rows]


def make_sampling_engine(*, vocab_size: int = 6, scale: float = 3.0, **options: Any) -> EngineUnderTest:
    """The real sampler on a fake model."""
    decoder = text_decoder(byte_level_tokenizer())
    engine = make_engine(decoder, **options)
    pool = engine.scheduler.kv_cache_manager.pool
    block_size = engine.scheduler.kv_cache_manager.block_size
    sizes = {"vocab_size": vocab_size, "num_blocks": pool.num_blocks, "block_size": block_size}
    engine.runner = LogitsRunner(scale=scale, reaches=engine.runner.reaches, **sizes)
    engine.engine = Engine(engine.runner, Sampler(vocab_size), engine.scheduler, OutputProcessor(decoder))
    return engine


def copying(*blocks: list[int], **options: Any) -> Request:
    """A request whose output copies its prompt, once for each block of ids, and then goes on with new ones."""
    prompt = [token_id for block in blocks for token_id in block]
    forced = [*prompt, *range(500, 900)]
    return make_request([*prompt, 9], extra_args={"forced": forced}, **options)


@st.composite
def workloads(draw: st.DrawFn) -> dict[str, Any]:
    ids = st.integers(0, 5)
    pattern = draw(st.lists(ids, min_size=1, max_size=6))
    return {
        "prompt": (pattern * 4)[: draw(st.integers(1, 20))],
        "n": draw(st.sampled_from([1, 1, 2, 3])),
        "max_tokens": draw(st.integers(0, 16)),
        "temperature": draw(st.sampled_from([0.0, 0.3, 1.0])),
        "top_k": draw(st.sampled_from([0, 2])),
        "seed": draw(st.integers(0, 3)),
        "logprobs": draw(st.sampled_from([None, None, 1])),
        "prompt_logprobs": draw(st.sampled_from([None, None, 0])),
        "repetition_penalty": draw(st.sampled_from([1.0, 1.0, 1.3])),
        "frequency_penalty": draw(st.sampled_from([0.0, 0.0, 0.7])),
        "stop_token_ids": draw(st.lists(ids, max_size=1)),
        "eos_token_ids": frozenset(draw(st.lists(ids, max_size=1))),
        "stop": draw(st.sampled_from([[], [], ["\x01\x02"], ["\x03"]])),
        "stream_interval": draw(st.sampled_from([1, 1, 3])),
        "final_only": draw(st.booleans()),
        "repetition_detection": draw(
            st.sampled_from([None, None, RepetitionDetection(max_pattern_size=3, min_count=3)])
        ),
        "cache_salt": draw(st.sampled_from([None, "salt"])),
        "priority": draw(st.integers(0, 1)),
    }


@given(
    requests=st.lists(workloads(), min_size=1, max_size=4),
    reaches=st.sampled_from(LAYOUTS),
    room=st.sampled_from([(44, 1), (24, 2), (12, 4), (16, 4), (64, 4)]),
    max_num_batched_tokens=st.sampled_from([1, 3, 8, 64]),
    max_num_seqs=st.integers(1, 6),
    enable_prefix_caching=st.booleans(),
)
def test_every_delta_is_what_it_is_without_speculation(
    requests: list[dict[str, Any]], reaches: tuple[Reach, ...], room: tuple[int, int], **options: Any
) -> None:
    options |= {"num_blocks": room[0] * len(reaches), "block_size": room[1], "max_model_len": MAX_LEN}
    options["reaches"] = reaches
    engine = make_sampling_engine(speculation=SPECULATION, **options)
    published = PublishedTexts(engine)
    engine.run(*(make_request(**one) for one in requests))
    roomy = make_sampling_engine(max_model_len=MAX_LEN)
    roomy.run(*(make_request(**one) for one in requests))

    assert deltas(engine) == deltas(roomy)
    assert is_idle(engine.engine.stats())
    published.check()


def deltas(engine: EngineUnderTest) -> list[list[Any]]:
    """Of each request, those of each sample in order: how samples take turns depends on who is preempted."""
    result = []
    for news in engine.news.values():
        assert not any(isinstance(item, Exception) for item in news), news
        result.append(sorted(news, key=lambda item: item.index))  # type: ignore[union-attr]
    return result


class PublishedTexts:
    """Every text that others could find in the cache at some time, from its start; and that it is there."""

    def __init__(self, engine: EngineUnderTest) -> None:
        self._engine = engine
        self._pool = engine.scheduler.kv_cache_manager.pool
        self._block_size = engine.scheduler.kv_cache_manager.block_size
        self._text_of_prefix_id: dict[object, tuple[int, ...]] = {}
        self._block_of_key: dict[BlockKey, int] = {}
        self._publish, self._pool.publish = self._pool.publish, self._note  # type: ignore[method-assign]

    def _note(self, block: int, key: BlockKey) -> int:
        before, token_ids = key
        prefix_id = self._publish(block, key)
        if not isinstance(token_ids, int):  # the number of another group, which holds the same tokens
            self._text_of_prefix_id[prefix_id] = self._text_of_prefix_id.get(before, ()) + token_ids
        self._block_of_key[key] = block
        return prefix_id

    def check(self) -> None:
        """Call it at the end: guesses that were wrong are in nobody's text."""
        texts = [tuple(one.token_ids) for request in self._engine.requests.values() for one in request.sequences]
        for published in self._text_of_prefix_id.values():
            assert any(text[: len(published)] == published for text in texts)
        for key, block in self._block_of_key.items():
            if (found := self._pool.find(key)) is not None and found.block == block:
                group, token_ids = 0, key[1]
                if isinstance(token_ids, int):
                    group, token_ids = token_ids, self._text_of_prefix_id[key[0]][-self._block_size :]
                assert self._engine.runner.slots[block] == [(group, token_id) for token_id in token_ids]


def test_a_guess_is_never_published_before_it_is_known_to_be_right() -> None:
    engine = make_engine(speculation=SPECULATION, block_size=1)
    published = PublishedTexts(engine)
    wrong = make_request([1, 2, 3, 4, 5, 6, 7], extra_args={"forced": [1, *range(100, 108)]})
    engine.run(wrong, copying(list(range(10, 30)), max_tokens=20))
    published.check()
    assert 0 < engine.engine.stats().draft_acceptance_rate < 1


def test_a_copied_prompt_takes_few_steps_and_the_same_tokens() -> None:
    text = list(range(10, 60))
    engine, plain = make_engine(speculation=SPECULATION), make_engine()
    result = engine.run(copying(text, max_tokens=50))
    assert result == plain.run(copying(text, max_tokens=50))
    assert result[0].token_ids == text
    assert engine.runner.num_steps <= plain.runner.num_steps / 3
    stats = engine.engine.stats()
    assert stats.num_generated_tokens == 50
    assert stats.num_computed_tokens - stats.num_draft_tokens + stats.num_accepted_tokens == 51 + 49


def test_drafts_and_accepted_ones_are_counted() -> None:
    # The output begins with 1: what came after the last 1, two tokens of it at first, is worth checking, half right.
    request = make_request([1, 2, 3, 4, 5], extra_args={"forced": [1, 2, 7, 8, 9]}, max_tokens=5)
    engine = make_engine(speculation=SPECULATION)
    engine.run(request)
    stats = engine.engine.stats()

    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (2, 1)
    assert stats.draft_acceptance_rate == 0.5
    assert engine.runner.num_steps == 4
    assert make_engine().engine.stats().draft_acceptance_rate == 0


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_nothing_is_drafted_past_the_last_token_allowed(max_tokens: int) -> None:
    text = list(range(10, 30))
    for options in ({"max_model_len": 21 + max_tokens}, {}):
        engine = make_engine(speculation=SPECULATION, **options)
        longest: list[int] = []
        engine.runner.on_step = lambda output, longest=longest: longest.extend(  # type: ignore[misc]
            len(item.sequence.token_ids) + len(item.sequence.draft_token_ids) for item in output.scheduled
        )
        result = engine.run(copying(text, max_tokens=50 if options else max_tokens))[0]
        assert result.token_ids == text[:max_tokens]
        assert max(longest) < 21 + max_tokens


def test_accepted_tokens_after_a_stop_are_dropped() -> None:
    text = [10, 11, 12, 13, 14, 15, 16, 17]
    engine = make_engine(speculation=SPECULATION)
    results = engine.run(copying(text, stop_token_ids=[14]), copying(text, eos_token_ids=frozenset({12})))
    assert [result.token_ids for result in results] == [[10, 11, 12, 13, 14], [10, 11, 12]]
    assert [result.finish_reason for result in results] == ["stop", "stop"]
    assert is_idle(engine.engine.stats())


def test_nobody_is_preempted_for_drafts() -> None:
    def requests() -> list[Request]:
        return [copying(list(range(10 * i, 10 * i + 7)), max_tokens=8) for i in range(4)]

    tight = {"num_blocks": 16, "block_size": 4, "max_model_len": 64}
    engine, plain = make_engine(speculation=SPECULATION, **tight), make_engine(**tight)
    assert engine.run(*requests()) == plain.run(*requests())
    assert engine.engine.stats().num_preemptions == plain.engine.stats().num_preemptions == 0
    assert engine.engine.stats().num_accepted_tokens > 0


def test_room_for_wrong_drafts_is_free_again_after_the_step() -> None:
    wrong = make_request([1, 2, 3, 4, 5, 6, 7], extra_args={"forced": [1, *range(100, 200)]}, max_tokens=20)
    engine = make_engine(speculation=SPECULATION, block_size=1)
    engine.add(wrong)
    engine.step()
    engine.step()
    stats = engine.engine.stats()
    assert stats.num_draft_tokens > 0
    assert stats.num_blocks - stats.num_free_blocks == 8
    assert stats.kv_waste_ratio == 0


@pytest.mark.parametrize("when", [2, 3])
def test_aborts_and_failures_in_between_leave_nothing_behind(when: int) -> None:
    engine = make_engine(speculation=SPECULATION, block_size=2)
    request, neighbour = copying(list(range(10, 40)), n=2, max_tokens=30), copying(list(range(40, 60)), max_tokens=20)
    engine.add(request)
    for _ in range(when):
        engine.step()
    engine.abort(request.request_id)
    assert engine.result(request.request_id).finish_reason == "abort"
    assert is_idle(engine.engine.stats())

    engine.add(copying(list(range(10, 40)), max_tokens=30))
    for _ in range(when):
        engine.step()
    engine.failing_step()
    assert is_idle(engine.engine.stats())
    assert engine.run(neighbour)[0].token_ids == list(range(40, 60))


def test_drafts_that_are_never_right_are_soon_not_checked_any_more() -> None:
    forced = [token_id for new in range(200) for token_id in (1, 100 + new)]
    engine = make_engine(speculation=SPECULATION, max_model_len=1000, num_blocks=300)
    engine.run(make_request([1, 50], extra_args={"forced": forced}, max_tokens=400))
    assert 0 < engine.engine.stats().num_draft_tokens < 20


def test_drafting_resumes_once_guesses_are_right_again() -> None:
    useless = [token_id for new in range(100) for token_id in (1, 100 + new)]
    text = list(range(2000, 2030))
    engine = make_engine(speculation=SPECULATION, max_model_len=1000, num_blocks=300)
    engine.run(make_request([1, 50], extra_args={"forced": useless + text * 4}, max_tokens=200 + 120))
    assert engine.engine.stats().num_accepted_tokens > 60


def test_a_full_step_checks_only_guesses_that_are_almost_sure() -> None:
    config = SpeculativeConfig(num_speculative_tokens=5, prompt_lookup_max=1)
    for num_sequences, most, least in ((1, 5, 2), (100, 0, 0)):
        sequences = [make_request([1, 2, 3, 4, 5, 6, 7, 1]).sequences[0] for _ in range(num_sequences)]
        drafts = list(Speculator(config).drafts(sequences, [5] * num_sequences, num_sequences, 512))
        assert least <= sum(len(ids) for _, ids in drafts) <= most


def test_limits_of_rows_and_tokens_hold() -> None:
    sequences = [make_request([1, 2, 3, 4, 5, 6, 7, 1]).sequences[0] for _ in range(2)]
    drafts = list(Speculator(SPECULATION).drafts(sequences, [0, 2], 2, 3))
    assert drafts == [(1, [2])]


def test_acceptance_counts_guesses_up_to_the_first_wrong_one() -> None:
    drafter = Drafter(SpeculativeConfig(num_speculative_tokens=3, prompt_lookup_max=2))
    text = [1, 2, 3, 4, 1, 2]
    before = drafter.acceptance
    assert drafter.guess(text) == [3, 4, 1]
    drafter.guess([*text, 3])
    rose = drafter.acceptance
    drafter.guess([*text, 3, 9])
    assert drafter.acceptance < rose > before


@given(
    token_ids=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    min_n=st.integers(1, 3),
    extra=st.integers(0, 2),
    num=st.integers(1, 5),
)
def test_the_index_finds_what_a_search_finds(token_ids: list[int], min_n: int, extra: int, num: int) -> None:
    sizes = range(min_n + extra, min_n - 1, -1)
    index = NgramIndex(sizes)
    for length in range(1, len(token_ids) + 1):
        so_far = token_ids[:length]
        assert index.continuation(so_far, num) == searched(so_far, sizes, num)
    assert NgramIndex(sizes).continuation(token_ids, num) == searched(token_ids, sizes, num), "read at once"


def searched(token_ids: list[int], sizes: range, num: int) -> list[int]:
    for size in sizes:
        for end in range(len(token_ids) - 1, size - 1, -1):
            if token_ids[end - size : end] == token_ids[-size:] and len(token_ids) >= size:
                whole = list(token_ids)
                for i in range(num):
                    whole.append(whole[end + i])
                return whole[len(token_ids) :]
    return []


def test_the_first_token_is_distributed_as_it_is_without_speculation() -> None:
    """Over seeds of the speculating run, against the softmax itself."""
    vocab_size, num = 5, 1000
    engine = make_sampling_engine(
        vocab_size=vocab_size, scale=1.0, speculation=SPECULATION, num_blocks=4000, max_model_len=64, max_num_seqs=8
    )
    results = engine.run(
        *(make_request([1, 2, 1, 2, 1], seed=seed * 7919, max_tokens=3, detokenize=False) for seed in range(num)),
        max_steps=20_000,
    )
    stats = engine.engine.stats()
    assert stats.num_accepted_tokens > 40 and stats.num_draft_tokens > 1.3 * stats.num_accepted_tokens
    table = engine.runner._table  # type: ignore[attr-defined]
    follows = [result.token_ids for result in results]
    for first in range(vocab_size):  # the third token, which only drafts that were right or wrong came before
        seen = [ids[2] for ids in follows if ids[:2] == [2, first]]
        expected = table[2, first].softmax(0) * len(seen)
        observed = torch.bincount(torch.tensor(seen), minlength=vocab_size)
        assert float(((observed - expected) ** 2 / expected).sum()) < 23.5, "p < 0.0001 with 4 degrees of freedom"


def test_streams_through_the_loop_are_the_same_and_stats_show_it() -> None:
    text = list(range(10, 60))
    params = copying(text, max_tokens=50, stream_interval=4).params
    with make_llm(speculative_config={"method": "ngram", "prompt_lookup_max": 3}) as llm:
        pieces = [output.outputs[0].token_ids for output in llm.stream([*text, 9], params)]
        stats = llm.stats()
    assert [token_id for piece in pieces for token_id in piece] == text
    assert stats.num_accepted_tokens > 30
    with make_llm() as llm:
        assert llm.generate([[*text, 9]], params, use_tqdm=False)[0].outputs[0].token_ids == text
        assert llm.stats().num_draft_tokens == 0


def often_copies(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Makes it likely that each token is the one four before it."""
    logits[[*prompt_ids, *output_ids][-4]] += 9.0
    return logits


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt_oss"])
@pytest.mark.parametrize("num_blocks", [200, 26])
def test_real_models_generate_the_same_tokens_with_it(architecture: str, num_blocks: int) -> None:
    model = make_model(architecture)
    prompts = [[7, 30, 7, 30, 7, 30, 7, 30], [5, 6, 8, 9] * 6, [3] * 9, list(range(100, 120))]
    params = [
        SamplingParams(max_tokens=24, ignore_eos=True, logprobs=1, **options)
        for options in (
            {"temperature": 0, "logits_processors": [often_copies]},
            {"temperature": 1, "seed": 1, "n": 2, "logits_processors": [often_copies]},
            {"temperature": 0, "repetition_penalty": 1.2, "logits_processors": [NoRepeatNGramLogitsProcessor(4)]},
            {"temperature": 0.5, "seed": 2, "top_p": 0.9},
        )
    ]
    outputs, logprobs = [], []
    for speculation in (None, {"num_speculative_tokens": 6, "prompt_lookup_min": 1, "prompt_lookup_max": 3}):
        settings = {"num_gpu_blocks_override": num_blocks, "block_size": 4, "speculative_config": speculation}
        with LLM(model, **settings) as llm:
            results = llm.generate(prompts, params, use_tqdm=False)
            stats = llm.stats()
        samples = [sample for result in results for sample in result.outputs]
        outputs.append([sample.token_ids for sample in samples])
        logprobs.append([sample.cumulative_logprob for sample in samples])
        assert stats.num_free_blocks == stats.num_blocks
        assert (stats.num_accepted_tokens > 10) == (speculation is not None)
        if architecture != "mistral":  # which gives the blocks behind its window back
            assert (stats.num_preemptions > 0) == (num_blocks < 100)
    assert outputs[0] == outputs[1]
    assert logprobs[1] == pytest.approx(logprobs[0], abs=1e-3), "what was computed beside drafts that were right"


def test_logits_processors_are_called_once_per_token_in_order() -> None:
    calls: list[list[int]] = []

    def count_up(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        calls.append(output_ids)
        return torch.full_like(logits, -torch.inf).index_fill_(0, torch.tensor(len(output_ids) % 5), 0.0)

    engine = make_sampling_engine(speculation=SPECULATION)
    result = engine.run(make_request([0, 1, 2, 3, 4], max_tokens=15, logits_processors=[count_up]))[0]
    assert result.token_ids == [0, 1, 2, 3, 4] * 3
    assert calls == [result.token_ids[:i] for i in range(15)]
    assert engine.engine.stats().num_accepted_tokens > 5


def test_a_processor_that_fails_after_an_accepted_token_ends_its_request_alone() -> None:
    def fail_at_the_fourth(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(output_ids) == 3:
            raise ZeroDivisionError("on purpose")
        return torch.full_like(logits, -torch.inf).index_fill_(0, torch.tensor(len(output_ids)), 0.0)

    engine, plain = make_sampling_engine(speculation=SPECULATION), make_sampling_engine()
    others = [make_request([1, 2, 1], temperature=0, max_tokens=20) for _ in range(2)]
    failing = make_request([0, 1, 2, 3, 4], logits_processors=[fail_at_the_fourth])
    error, other = engine.run(failing, others[0])
    assert isinstance(error.error, EngineError) and isinstance(error.error.__cause__, ZeroDivisionError)
    assert error.token_ids == [0, 1, 2]
    assert other == plain.run(others[1])[0]
    assert is_idle(engine.engine.stats())


def test_a_guess_that_met_an_error_does_not_count_as_right() -> None:
    def fives(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(output_ids) == 2:
            raise ZeroDivisionError("on purpose")
        return torch.full_like(logits, -torch.inf).index_fill_(0, torch.tensor(5), 0.0)

    engine = make_sampling_engine(speculation=SPECULATION)
    engine.run(make_request([5, 5, 5, 5], logits_processors=[fives]))
    stats = engine.engine.stats()
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (2, 1)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"method": "eagle"}, "method='eagle'.*available: 'ngram'"),
        ({"metod": "ngram"}, "did you mean 'method'"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens=0"),
        ({"prompt_lookup_max": 2, "prompt_lookup_min": 3}, "prompt_lookup_min=3.*from 1 to 2"),
        ({"prompt_lookup_max": 0}, "prompt_lookup_max=0"),
        ("ngram", "speculative_config='ngram' must be"),
        ({1: 2}, "must be"),
    ],
)
def test_settings_that_make_no_sense_are_refused(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(speculative_config=value)


def test_settings_are_taken_as_a_mapping_or_as_an_object() -> None:
    fields = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 5, "prompt_lookup_min": 2}
    assert EngineConfig(speculative_config=fields) == EngineConfig(speculative_config=SpeculativeConfig(**fields))
    assert hash(EngineConfig(speculative_config=fields)) != hash(EngineConfig())
    assert [*SpeculativeConfig(prompt_lookup_max=3).lookup_sizes] == [3]
    assert [*SpeculativeConfig(prompt_lookup_min=2, prompt_lookup_max=3).lookup_sizes] == [3, 2]
