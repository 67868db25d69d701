"""A step is launched before the tokens of the one before are known: nobody can tell, but for the time it takes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, multiple, rule

from helpers import (
    FakeDraws,
    FakeRunner,
    FakeSampler,
    StepFailure,
    byte_level_tokenizer,
    check_blocks,
    is_idle,
    make_engine,
    make_llm,
    make_request,
    text_decoder,
)
from helpers_architectures import make_tiny
from helpers_crowd import LAYOUTS, CrowdedMachine
from helpers_lora import save_adapter
from helpers_models import make_model, save_model
from paged_backend import LLM, Backend, BeamSearchParams, ConfigError, EngineError, LoRARequest, SamplingParams
from paged_backend.engine.kv_layout import Reach
from paged_backend.engine.request import Request
from paged_backend.engine.scheduler import SchedulerOutput

MAX_LEN = 20
PREFIXES = ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9, 9, 9, 9], [7] * 8)
ENDS = frozenset(range(0, 1000, 7))
"""Ids that end one sequence in seven at each of its tokens."""


@st.composite
def workloads(draw: st.DrawFn) -> dict[str, Any]:
    """Options of a request; some end at a token that nobody can foresee, some have to know each one in time."""
    prefix = draw(st.sampled_from(PREFIXES))[: draw(st.integers(0, 8))]
    kind = draw(st.sampled_from(["plain", "plain", "plain", "needs tokens", "beams"]))
    options: dict[str, Any] = {
        "prompt": [*prefix, *draw(st.lists(st.integers(0, 2), min_size=1, max_size=4))],
        "max_tokens": draw(st.integers(1 if kind == "beams" else 0, 8)),
        "priority": draw(st.integers(0, 2)),
        "seed": draw(st.integers(0, 3)),
        "eos_token_ids": draw(st.sampled_from([frozenset(), ENDS])),
    }
    if kind == "beams":
        params = BeamSearchParams(beam_width=2, max_tokens=options["max_tokens"])
        return options | {"beam_params": params, "n": params.sampling_params().n}
    more = {"extra_args": {"needs_tokens": True}} if kind == "needs tokens" else {}
    return (
        options
        | more
        | {
            "n": draw(st.sampled_from([1, 1, 2, 3])),
            "stop_token_ids": draw(st.sampled_from([None, [11, 22, 33]])),
            "logprobs": draw(st.sampled_from([None, 0])),
            "prompt_logprobs": draw(st.sampled_from([None, None, 0])),
        }
    )


class CrowdedAsyncEngine(CrowdedMachine):
    """Requests come, are aborted and fail in a cache this small; what is left gets what a roomy engine gives that
    waits for each step."""

    requests = CrowdedMachine.requests

    @initialize(
        reaches=st.sampled_from(LAYOUTS),
        room=st.sampled_from([(0, 1), (4, 1), (0, 2), (3, 2), (1, 4), (4, 4)]),
        max_num_batched_tokens=st.integers(2, 24),
        max_num_seqs=st.integers(2, 6),
        enable_prefix_caching=st.sampled_from([True, True, True, False]),
        num_swap_blocks=st.sampled_from([0, 3, 8, 100]),
    )
    def make(self, reaches: tuple[Reach, ...], room: tuple[int, int], **options: Any) -> None:
        self.crowd(reaches, *room, is_asynchronous=True, max_model_len=MAX_LEN, **options)

    @rule(target=requests, workload=workloads(), num_copies=st.integers(1, 3))
    def add(self, workload: dict[str, Any], num_copies: int) -> Any:
        return multiple(*self.submit(lambda: make_request(**workload), num_copies))

    def check(self, request_id: str, make: Callable[[], Request]) -> None:
        result, expected = self.engine.result(request_id), make_engine(max_model_len=MAX_LEN).run(make())[0]
        if result.error is not None:
            assert isinstance(result.error.__cause__, StepFailure), result.error
        elif request_id not in self.aborted:
            assert result == expected
        if expected.outputs[0].score is None:  # beams are nothing before their end
            for output, whole in zip(result.outputs, expected.outputs, strict=True):
                assert output.token_ids == whole.token_ids[: len(output.token_ids)]


TestCrowdedAsyncEngine = CrowdedAsyncEngine.TestCase
TestCrowdedAsyncEngine.settings = settings(stateful_step_count=20)


def results_of(is_asynchronous: bool, make: Callable[[], list[Request]], **options: Any) -> list[Any]:
    engine = make_engine(text_decoder(byte_level_tokenizer()), is_asynchronous=is_asynchronous, **options)
    results = engine.run(*make())
    assert is_idle(engine.engine.stats())
    return results


def test_a_sequence_is_computed_once_too_often_if_nobody_could_foresee_its_end_and_never_otherwise() -> None:
    def num_computed(**options: Any) -> int:
        engine = make_engine(text_decoder(byte_level_tokenizer()), is_asynchronous=True)
        engine.run(make_request(range(5), **options))
        assert engine.engine.stats().num_generated_tokens == 4
        return engine.runner.num_tokens

    assert num_computed(max_tokens=4) == 5 + 3
    assert num_computed(eos_token_ids=frozenset([9]), extra_args={"forced": [1, 2, 3, 9, 0]}) == 5 + 4
    assert num_computed(stop=["b"], extra_args={"forced": list(b"aaab!")}) == 5 + 4


def test_the_text_before_a_stop_string_is_the_same_and_nothing_after_it_is_seen() -> None:
    def make() -> list[Request]:
        return [
            make_request(range(number, 40), stop=["bc"], logprobs=0, extra_args={"forced": list(b"aaabcde")})
            for number in range(4)
        ]

    results = results_of(True, make)
    assert results == results_of(False, make)
    assert {result.text for result in results} == {"aaa"}


def test_what_was_generated_is_found_in_the_prefix_cache_as_soon() -> None:
    def num_cached(is_asynchronous: bool, num_tokens: int) -> int:
        engine = make_engine(is_asynchronous=is_asynchronous, block_size=4)
        first = engine.run(make_request(range(5), max_tokens=num_tokens))[0]
        request = make_request([*range(5), *first.token_ids, 1], max_tokens=1)
        engine.run(request)
        return request.sequences[0].num_cached_tokens

    for num_tokens in range(1, 14):
        assert num_cached(True, num_tokens) == num_cached(False, num_tokens)


def test_requests_that_arrive_while_a_step_is_in_flight_share_what_it_computes() -> None:
    engine = make_engine(is_asynchronous=True, block_size=4)
    engine.add(make_request(range(9)))
    engine.step()
    other = make_request(range(9))
    engine.run(other)
    assert other.sequences[0].num_cached_tokens == 8


def test_a_step_with_a_request_that_has_to_know_its_tokens_is_completed_at_once() -> None:
    engine = make_engine(is_asynchronous=True)
    plain, other = make_request(max_tokens=9), make_request(max_tokens=3, extra_args={"needs_tokens": True})
    engine.add(plain)
    engine.step()
    assert engine.result(plain.request_id).token_ids == []
    engine.add(other)
    engine.step()
    assert [len(engine.result(request.request_id).token_ids) for request in (plain, other)] == [2, 1]
    engine.run()
    assert [len(engine.result(request.request_id).token_ids) for request in (plain, other)] == [9, 3]


@pytest.mark.parametrize("num_steps", range(1, 9))
def test_a_block_behind_a_chunk_is_published_before_it_is_given_back(num_steps: int) -> None:
    """It may be filled by a token that is not known, in a step after which no other is launched ahead."""
    reaches = [Reach(chunk=4)]
    engine = make_engine(is_asynchronous=True, reaches=reaches, block_size=2, max_num_batched_tokens=2)
    engine.add(make_request([1], max_tokens=12))
    for _ in range(num_steps):
        engine.step()
    engine.add(make_request([2], max_tokens=3, extra_args={"needs_tokens": True}))
    while engine.engine.has_work:
        engine.step()
        check_blocks(engine.scheduler)


def test_an_aborted_request_gets_nothing_of_the_step_in_flight() -> None:
    engine = make_engine(is_asynchronous=True)
    aborted, other = make_request(), make_request()
    engine.add(aborted, other)
    engine.step()
    engine.abort(aborted.request_id)
    results = engine.run()
    result = engine.result(aborted.request_id)
    assert (result.token_ids, result.finish_reason, results) == ([], "abort", [])
    assert len(engine.result(other.request_id).token_ids) == 8
    assert is_idle(engine.engine.stats())


def test_draws_that_fail_end_the_requests_that_wait_for_them_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(is_asynchronous=True)
    failed, later = make_request(range(9)), make_request(range(9))
    engine.add(failed)
    engine.step()
    engine.step()

    def fail(draws: FakeDraws) -> None:
        raise StepFailure("on purpose")

    engine.add(later)
    with monkeypatch.context() as patch:
        patch.setattr(FakeDraws, "result", fail)
        engine.step()  # computes both, and finds out that the step before has failed
    engine.run()
    assert isinstance(engine.result(failed.request_id).error, EngineError)
    assert engine.result(later.request_id) == make_engine().run(make_request(range(9)))[0]
    assert is_idle(engine.engine.stats())


# --- how long it takes ---

DEVICE_SECONDS, HOST_SECONDS, NUM_STEPS = 0.02, 0.015, 30


class Device:
    """Computes one step after the other, each in `DEVICE_SECONDS`, while nobody waits."""

    def __init__(self) -> None:
        self._free_at = 0.0

    def launch(self) -> float:
        """When what is launched now is computed."""
        self._free_at = max(self._free_at, time.monotonic()) + DEVICE_SECONDS
        return self._free_at


def wait_for(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


class LaunchingRunner(FakeRunner):
    def __init__(self) -> None:
        super().__init__()
        self._device = Device()
        self.computed_at = 0.0

    def execute(self, output: SchedulerOutput) -> list[list[int]]:
        logits = super().execute(output)
        time.sleep(HOST_SECONDS)  # to prepare and launch it
        self.computed_at = self._device.launch()
        return logits


class WaitingDraws:
    def __init__(self, draws: Any, computed_at: float) -> None:
        self.tokens, self._draws, self._computed_at = draws.tokens, draws, computed_at

    def result(self) -> Any:
        wait_for(self._computed_at)
        return self._draws.result()


class LaunchingSampler(FakeSampler):
    def __init__(self, runner: LaunchingRunner) -> None:
        super().__init__()
        self._runner = runner

    def sample(self, logits: Any, sequences: Any) -> Any:
        wait_for(self._runner.computed_at)
        return super().sample(logits, sequences)

    def start(self, logits: Any, sequences: Any) -> Any:
        return WaitingDraws(FakeSampler().start(logits, sequences), self._runner.computed_at)


def test_a_step_takes_as_long_as_the_device_or_the_host_and_not_as_both() -> None:
    def seconds_per_step(async_scheduling: bool) -> float:
        runner = LaunchingRunner()
        backend = Backend(
            name="slow",
            runner=runner,
            sampler=LaunchingSampler(runner),
            tokenizer=None,
            max_model_len=256,
            takes_pending_tokens=True,
        )
        with LLM.from_backend(backend, async_scheduling=async_scheduling, block_size=4) as llm:
            start = time.monotonic()
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=NUM_STEPS, temperature=0), use_tqdm=False)
            return (time.monotonic() - start) / NUM_STEPS

    one_after_the_other, both_at_once = seconds_per_step(False), seconds_per_step(True)
    assert one_after_the_other >= DEVICE_SECONDS + HOST_SECONDS
    assert max(DEVICE_SECONDS, HOST_SECONDS) <= both_at_once * 1.1  # the first step has no other beside it
    assert both_at_once < 0.8 * one_after_the_other


# --- a real model ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


PROMPTS = [[7 * index + i for i in range(3 + 4 * index)] for index in range(4)]
PLAIN = SamplingParams(max_tokens=12, temperature=0)
PARAMS = [
    PLAIN,
    PLAIN.replace(temperature=0.9, seed=3, n=2, top_k=40, top_p=0.95),
    PLAIN.replace(logprobs=3, logprob_token_ids=[5, 7], prompt_logprobs=2),
    PLAIN.replace(temperature=1.0, seed=5, min_tokens=6, stop_token_ids=list(range(0, 250, 3)), logprobs=1),
    PLAIN.replace(temperature=1.0, seed=6, logit_bias={65: 3.0, 66: -100.0}, allowed_token_ids=[65, 66, 67, 68]),
    PLAIN.replace(temperature=1.0, seed=7, stop=["e", "q", "\ufffd"]),
    PLAIN.replace(repetition_penalty=1.3, frequency_penalty=0.2),
    PLAIN.replace(temperature=1.0, seed=8, bad_words=["a", "bc"]),
]
SETTINGS: dict[str, Any] = {"kv_cache_memory": "4MiB", "block_size": 4, "max_num_batched_tokens": 16}


def generated(folder: Path, params: list[SamplingParams], **options: Any) -> list[Any]:
    with LLM(folder, **SETTINGS | options) as llm:
        prompts = [PROMPTS[number % len(PROMPTS)] for number in range(len(params))]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        outputs += llm.generate(prompts, params, use_tqdm=False)  # these find prefixes
        assert is_idle(llm.stats())
    return outputs


BATCHES = {"greedy": PARAMS[:1] * 4, "plain": PARAMS[:6], "mixed": PARAMS}


@pytest.mark.parametrize("params", BATCHES.values(), ids=BATCHES)
def test_the_real_engine_gives_the_same(folder: Path, params: list[SamplingParams]) -> None:
    outputs, expected = (generated(folder, params, async_scheduling=is_on) for is_on in (True, False))
    for output, same in zip(outputs, expected, strict=True):
        assert output.outputs == same.outputs
        assert output.prompt_logprobs == same.prompt_logprobs
        assert output.num_cached_tokens == same.num_cached_tokens


@pytest.mark.parametrize("swap_space", [0, 0.01])
@pytest.mark.parametrize("params", BATCHES.values(), ids=BATCHES)
def test_the_real_engine_gives_the_same_if_it_is_crowded(
    folder: Path, params: list[SamplingParams], swap_space: float
) -> None:
    def samples(**options: Any) -> list[Any]:
        """Without log-probabilities, whose last digits depend on who is in a step with whom."""
        outputs = generated(folder, params, num_gpu_blocks_override=14, swap_space=swap_space, **options)
        return [
            (one.token_ids, one.text, one.finish_reason, one.stop_reason)
            for output in outputs
            for one in output.outputs
        ]

    assert samples(async_scheduling=True) == samples(async_scheduling=False)


def test_grammars_and_adapters_work_beside_it(folder: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", make_model())

    def texts(**options: Any) -> list[str]:
        with LLM(folder, enable_lora=True, **SETTINGS | options) as llm:
            params = [PLAIN, PLAIN.replace(structured_outputs={"choice": ["yes", "no"]}), PLAIN]
            lora = [LoRARequest("some", 1, str(adapter)), None, None]
            return [output.outputs[0].text for output in llm.generate(["a b"] * 3, params, lora_request=lora)]

    found = texts(async_scheduling=True)
    assert found == texts(async_scheduling=False)
    assert found[1] in ("yes", "no") and found[0] != found[2]


# --- when ---


def test_it_does_not_work_with_speculation_and_says_so() -> None:
    with pytest.raises(ConfigError, match=r"async_scheduling=True .* speculative_config"):
        make_llm(async_scheduling=True, speculative_config={})
    make_llm(speculative_config={}).close()


@pytest.mark.parametrize(
    "async_scheduling, is_asynchronous, expected",
    [
        (None, False, False),
        (None, True, True),
        (False, True, False),
        (True, False, True),
    ],
)
def test_it_is_on_where_steps_are_launched_unless_somebody_says_otherwise(
    async_scheduling: bool | None, is_asynchronous: bool, expected: bool
) -> None:
    sampler = FakeSampler()
    starts: list[int] = []
    start, sampler.start = sampler.start, lambda *args: starts.append(1) or start(*args)  # type: ignore[method-assign]
    backend = Backend(
        name="fake",
        runner=FakeRunner(),
        sampler=sampler,
        tokenizer=None,
        max_model_len=64,
        takes_pending_tokens=True,
        is_asynchronous=is_asynchronous,
    )
    with LLM.from_backend(backend, block_size=4, async_scheduling=async_scheduling) as llm:
        llm.generate([[1, 2]], SamplingParams(max_tokens=3), use_tqdm=False)
    assert bool(starts) == expected


def test_models_that_have_to_know_their_tokens_do_without(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with LLM(make_tiny("bloom"), async_scheduling=True, kv_cache_memory="4MiB") as llm:
        llm.generate([[5, 6, 7]], PLAIN, use_tqdm=False)
    assert "no asynchronous scheduling" in caplog.text
