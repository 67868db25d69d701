"""Faults reported of other engines, replayed: what no other file states yet."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from helpers import WAIT_SECONDS, byte_level_tokenizer, is_idle, make_engine, make_llm, make_request, text_decoder
from helpers_models import VOCAB_SIZE, make_model, make_tokenizer
from paged_backend import (
    LLM,
    CompletionOutput,
    EngineConfig,
    InvalidRequestError,
    RequestOutput,
    SamplingParams,
)
from paged_backend.chat.tokenizer import Tokenizer
from paged_backend.model.demo import demo_folder

BROKEN = "\ufffd"
PROMPT = list(b"Paris Paris Paris Paris")
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=None)


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model("llama")


@torch.inference_mode()
def log_probabilities(model: Any, token_ids: list[int]) -> torch.Tensor:
    """Of what follows the last id."""
    return model(torch.tensor([token_ids])).logits[0, -1].log_softmax(-1)


def make_real_llm(model: Any, **settings: Any) -> LLM:
    return LLM(model, make_tokenizer(), **{"kv_cache_memory": "8MiB"} | settings)


def make_fake_llm(**settings: Any) -> LLM:
    llm: LLM = make_llm(tokenizer=Tokenizer(make_tokenizer()), **settings)
    return llm


def joined(outputs: list[RequestOutput]) -> CompletionOutput:
    """What a stream of one answer gave, as one."""
    pieces = [output.outputs[0] for output in outputs]
    return CompletionOutput(
        index=0,
        text="".join(piece.text for piece in pieces),
        token_ids=[token_id for piece in pieces for token_id in piece.token_ids],
        cumulative_logprob=pieces[-1].cumulative_logprob,
        logprobs=[entry for piece in pieces for entry in piece.logprobs or ()],
        finish_reason=pieces[-1].finish_reason,
        stop_reason=pieces[-1].stop_reason,
    )


# --- preemption and cached prefixes on a real model ---


def make_eventful_params() -> list[SamplingParams]:
    """Whatever tells outputs from prompt tokens, greedy and sampled."""
    penalties = {"presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.2}
    greedy = SamplingParams(temperature=0, max_tokens=20, min_tokens=10, logprobs=1, **penalties)
    return [greedy, greedy.replace(temperature=1.0, seed=3), greedy.replace(temperature=1.0, seed=4, top_p=0.9), greedy]


@pytest.mark.parametrize("num_blocks, is_stream", [(7, True), (14, False)])
def test_preemption_leaves_penalties_min_tokens_logprobs_and_usage_alone(
    model: Any, num_blocks: int, is_stream: bool
) -> None:
    prompts = [list(range(20 * index, 20 * index + 8)) for index in range(4)]

    def run(llm: LLM) -> list[tuple[int, CompletionOutput]]:
        handles = [llm.submit(*one) for one in zip(prompts, make_eventful_params(), strict=True)]
        if is_stream:
            streams = [list(handle) for handle in handles]
            return [(len(outputs[0].prompt_token_ids), joined(outputs)) for outputs in streams]
        results = [handle.result(WAIT_SECONDS) for handle in handles]
        return [(len(result.prompt_token_ids), result.outputs[0]) for result in results]

    with make_real_llm(model, block_size=4, num_gpu_blocks_override=num_blocks) as crowded:
        results = run(crowded)
        stats = crowded.stats()
    with make_real_llm(model, block_size=4, num_gpu_blocks_override=500) as roomy:
        expected = run(roomy)

    assert stats.num_preemptions > 0 and is_idle(stats)
    for (num_prompt, output), (num_expected, right) in zip(results, expected, strict=True):
        assert num_prompt == num_expected == 8
        assert (output.token_ids, output.text, output.finish_reason) == (right.token_ids, right.text, "length")
        assert len(output.logprobs or ()) == len(output.token_ids) == 20
        for entry, right_entry in zip(output.logprobs or (), right.logprobs or (), strict=True):
            assert {i: one.rank for i, one in entry.items()} == {i: one.rank for i, one in right_entry.items()}


@pytest.mark.parametrize("max_num_batched_tokens", [8, 512])
def test_the_first_token_after_a_cached_prefix_has_the_models_log_probability(
    model: Any, max_num_batched_tokens: int
) -> None:
    head, params = list(range(64)), GREEDY.replace(max_tokens=1, logprobs=0)
    prompts = [[*head, *range(100, 100 + length)] for length in (1, 2, 15, 16, 17)]
    with make_real_llm(model, max_num_batched_tokens=max_num_batched_tokens) as llm:
        llm.generate(head, params)
        one_by_one = [llm.generate(prompt, params)[0] for prompt in prompts]
        busy = llm.submit(PROMPT, GREEDY.replace(max_tokens=200))
        next(busy)  # so that hits are in one step with somebody's decode
        together = llm.generate(prompts, params)
        busy.close()

    for prompt, *outputs in zip(prompts, one_by_one, together, strict=True):
        right = log_probabilities(model, prompt)
        for output in outputs:
            (token_id,) = output.outputs[0].token_ids
            assert output.num_cached_tokens >= 64
            assert token_id == int(right.argmax())
            assert output.outputs[0].cumulative_logprob == pytest.approx(float(right[token_id]), abs=1e-4)


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 5}])
@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
def test_presence_and_frequency_count_generated_tokens_only(model: Any, penalty: str, settings: dict[str, Any]) -> None:
    right: list[int] = []
    for _ in range(16):
        row = log_probabilities(model, PROMPT + right)
        counts = torch.bincount(torch.tensor(right, dtype=torch.long), minlength=VOCAB_SIZE)
        taken_off = 2.0 * (counts if penalty == "frequency_penalty" else counts.clamp(max=1))
        right.append(int((row - taken_off).argmax()))
    with make_real_llm(model, **settings) as llm:
        for _ in range(2):  # the second time with a cached prefix
            (output,) = llm.generate(PROMPT, GREEDY.replace(**{penalty: 2.0}))
            assert output.outputs[0].token_ids == right


# --- sampling ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_uniform", [False, True])
def test_a_batch_of_extreme_settings_gives_greedy_tokens_or_at_least_tokens(
    dtype: torch.dtype, is_uniform: bool
) -> None:
    own = make_model("llama")
    if is_uniform:
        own.lm_head.weight.zero_()
    grid = list(
        itertools.product(
            (0, 1e-6, 1e-5, 1e-4, 1e-3, 2), (5e-324, 1e-8, 1e-3, 1), (-1, 0, None, 1, VOCAB_SIZE, 2**70), (0, 1)
        )
    )
    params = [
        SamplingParams(temperature=t, top_p=p, top_k=k, min_p=m, max_tokens=5, seed=1, ignore_eos=True)
        for t, p, k, m in grid
    ]
    with make_real_llm(own.to(dtype), block_size=4, kv_cache_memory="32MiB") as llm:
        (greedy,) = llm.generate(PROMPT, GREEDY.replace(max_tokens=5))
        outputs = llm.generate([PROMPT] * len(params), params)

    for (t, p, k, m), output in zip(grid, outputs, strict=True):
        token_ids = output.outputs[0].token_ids
        assert len(token_ids) == 5 and all(0 <= token_id < VOCAB_SIZE for token_id in token_ids)
        is_certain = t < 1e-5 or k == 1 or m == 1  # else equal tokens are equally likely
        if is_certain or (not is_uniform and (t <= 1e-3 or p <= 1e-3)):
            assert token_ids == greedy.outputs[0].token_ids, (t, p, k, m)


# --- text ---

CHARACTERS = ("🙂", "👍🏽", "👨‍👩‍👧‍👦", "🇩🇪", "ď", "日本語", " Paris", "  é")


def test_a_batch_of_split_characters_streams_each_of_them_whole() -> None:
    texts = [f"{character}!{character} " for character in CHARACTERS]
    with make_fake_llm() as llm:
        handles = [
            llm.submit([1], SamplingParams(max_tokens=len(ids), extra_args={"forced": ids}))
            for ids in (list(text.encode()) for text in texts)
        ]
        streams = [list(handle) for handle in handles]

    assert [joined(outputs).text for outputs in streams] == texts
    for outputs in streams:
        assert not any(BROKEN in output.outputs[0].text for output in outputs)


@pytest.mark.parametrize("stream_interval", [1, 3, 100])
@pytest.mark.parametrize("stop", [["DEFGHIJ"], ["DEFGHIK"], ["DE", "DEF"], ["🙂GH"]])
def test_logprobs_of_a_stream_that_holds_text_back_are_those_of_the_whole(
    stop: list[str], stream_interval: int
) -> None:
    forced = list("ABC DEFGHIJ 🙂GH x".encode())
    params = SamplingParams(
        max_tokens=len(forced), stop=stop, logprobs=0, stream_interval=stream_interval, extra_args={"forced": forced}
    )
    with make_fake_llm() as llm:
        (whole,) = llm.generate([[1]], params)[0].outputs
        streamed = joined(list(llm.stream([1], params)))

    assert streamed == whole
    assert whole.logprobs is not None
    assert [next(iter(entry)) for entry in whole.logprobs] == whole.token_ids
    text = bytes(forced).decode()
    cut = min((text.find(one) for one in stop if one in text), default=len(text))
    assert whole.text == text[:cut]


def test_each_alternatives_text_is_its_own_with_its_leading_space() -> None:
    engine = make_engine(text_decoder(byte_level_tokenizer(" Paris", b"\xf0\x9f", b"\x99\x82")))
    result = engine.run(make_request(extra_args={"forced": [256, 257, 258]}, max_tokens=3, logprobs=0))[0]
    entries = zip(result.outputs[0].logprobs or (), result.token_ids, strict=True)
    texts = [entry[token_id].decoded_token for entry, token_id in entries]

    assert result.text == " Paris🙂"
    assert texts[0] == " Paris"
    assert all(text and set(text) == {BROKEN} for text in texts[1:])


@pytest.mark.parametrize("final_only", [True, False])
@pytest.mark.parametrize(
    "options, expected",
    [
        ({"stop": ["\n"], "min_tokens": 4}, ("a\nbcd", "stop")),
        ({"stop": ["a\n"], "min_tokens": 4}, ("a\nbcd\nef", "length")),
        ({"stop": ["cd"], "min_tokens": 4}, ("a\nb", "stop")),
        ({"stop": ["cd"], "min_tokens": 5}, ("a\nbcd\nef", "length")),
        ({"stop": ["\n"], "min_tokens": 8}, ("a\nbcd\nef", "length")),
    ],
)
def test_min_tokens_holds_for_stop_strings(options: dict[str, Any], expected: Any, final_only: bool) -> None:
    engine = make_engine(text_decoder(byte_level_tokenizer()))
    request = make_request(extra_args={"forced": list(b"a\nbcd\nef")}, final_only=final_only, **options)
    result = engine.run(request)[0]

    assert (result.text, result.finish_reason) == expected
    assert len(result.token_ids) > min(options["min_tokens"], 7)


@pytest.mark.parametrize("final_only", [True, False])
def test_an_end_token_within_what_may_become_a_stop_string_keeps_the_text_and_is_the_reason(final_only: bool) -> None:
    engine = make_engine(text_decoder(byte_level_tokenizer()))
    forced = [*b"ok\nOb", 0, *b"never"]
    request = make_request(
        extra_args={"forced": forced}, stop=["\nObservation"], eos_token_ids=frozenset({0}), final_only=final_only
    )
    result = engine.run(request)[0]

    assert (result.text, result.finish_reason, result.stop_reason) == ("ok\nOb", "stop", None)
    assert result.token_ids == forced[:6]


def test_cancelling_one_of_several_calls_leaves_the_others_alone() -> None:
    params = SamplingParams(max_tokens=50, seed=1)

    async def ask(llm: LLM) -> list[Any]:
        tasks = [asyncio.create_task(llm.agenerate([[1, index]], params)) for index in range(7)]
        endless = asyncio.create_task(llm.agenerate([[1, 9]], ENDLESS))
        while llm.stats().num_running == 0:
            await asyncio.sleep(0)
        endless.cancel()
        return await asyncio.wait_for(asyncio.gather(*tasks, endless, return_exceptions=True), WAIT_SECONDS)

    with make_llm(num_blocks=4096, block_size=16, max_model_len=60_000) as llm:
        right = llm.generate([[1, index] for index in range(7)], params)
        *answers, cancelled = asyncio.run(ask(llm))

        assert isinstance(cancelled, asyncio.CancelledError)
        assert [answer[0].outputs for answer in answers] == [output.outputs for output in right]
        assert is_idle(llm.stats())


# --- refusals ---


async def drain(stream: Any) -> None:
    async for _ in stream:
        pass


def make_ways(llm: LLM, text: str) -> list[Callable[[], object]]:
    """Every way to send a text."""
    chat = [{"role": "user", "content": text}]
    return [
        lambda: llm.submit(text),
        lambda: llm.stream(text),
        lambda: llm.stream_chat(chat),
        lambda: llm.generate(text),
        lambda: llm.chat(chat),
        lambda: asyncio.run(llm.agenerate(text)),  # type: ignore[arg-type]
        lambda: asyncio.run(llm.achat(chat)),  # type: ignore[arg-type]
        lambda: asyncio.run(drain(llm.astream(text))),
        lambda: asyncio.run(drain(llm.astream_chat(chat))),
    ]


@pytest.mark.parametrize("text, reason", [("a\ud83d", "surrogate"), ("x" * 100_000, "max_model_len")])
def test_a_text_that_cannot_be_served_is_refused_before_any_output_on_every_path(text: str, reason: str) -> None:
    with make_fake_llm() as llm:
        for way in make_ways(llm, text):
            with pytest.raises(InvalidRequestError, match=reason) as caught:
                way()
            assert isinstance(caught.value, ValueError)
        assert is_idle(llm.stats()) and llm.stats().num_steps == 0


def test_a_null_character_is_text_like_any_other() -> None:
    with make_fake_llm() as llm:
        (output,) = llm.chat([{"role": "user", "content": "a\0b"}], SamplingParams(max_tokens=1))
    assert output.prompt is not None and "a\0b" in output.prompt and 0 in output.prompt_token_ids


def test_a_list_under_one_request_id_is_refused_as_a_whole() -> None:
    with make_fake_llm() as llm:
        with pytest.raises(InvalidRequestError, match="'x'"):
            llm.generate(["a", "b"], SamplingParams(max_tokens=2), request_id="x")
        assert is_idle(llm.stats()) and llm.stats().num_steps == 0
        assert llm.generate(["a"], SamplingParams(max_tokens=2), request_id="x")[0].request_id == "x"


def test_aborting_who_waits_ends_its_reader_and_leaves_the_running_one_alone() -> None:
    params = SamplingParams(max_tokens=200, seed=1)
    with make_fake_llm(max_num_seqs=1, num_blocks=128) as llm:
        (expected,) = llm.generate([[1, 2]], params)
        running = llm.submit([1, 2], params)
        waiting = [llm.submit([3, index], ENDLESS) for index in range(2)]
        for handle in reversed(waiting):
            handle.abort()
            handle.abort()
        ends = [[output.outputs[0].finish_reason for output in handle] for handle in waiting]
        result = running.result(WAIT_SECONDS)
        running.abort()

        assert [end[-1] for end in ends] == ["abort", "abort"]
        assert result.outputs == expected.outputs
        assert is_idle(llm.stats())


# --- event loops ---


class WaitingTokenizer(Tokenizer):
    """Needs the event loop to go on before it tokenises."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer)
        self.loop_went_on = threading.Event()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert self.loop_went_on.wait(WAIT_SECONDS), "tokenising keeps the event loop waiting"
        return super().encode(text, add_special_tokens=add_special_tokens)


TEXT = "x" * 200_000
CHAT = [{"role": "user", "content": TEXT}]


@pytest.mark.parametrize(
    "ask",
    [
        lambda llm: llm.agenerate(TEXT),
        lambda llm: llm.agenerate([TEXT[:1000]] * 200),
        lambda llm: llm.achat(CHAT),
        lambda llm: drain(llm.astream(TEXT)),
        lambda llm: drain(llm.astream_chat(CHAT)),
    ],
    ids=["agenerate", "list", "achat", "astream", "astream_chat"],
)
def test_other_tasks_run_while_a_long_text_is_tokenised(ask: Callable[[LLM], Awaitable[Any]]) -> None:
    tokenizer = WaitingTokenizer(make_tokenizer())

    async def other() -> None:
        await asyncio.sleep(0)  # `ask` has begun
        tokenizer.loop_went_on.set()

    async def both() -> None:
        await asyncio.wait_for(asyncio.gather(ask(llm), other()), WAIT_SECONDS)

    with make_llm(tokenizer=tokenizer) as llm:
        with pytest.raises(InvalidRequestError, match="max_model_len"):
            asyncio.run(both())
        assert is_idle(llm.stats())


# --- chats ---


@pytest.mark.parametrize("content", ["According to", ["According", {"type": "text", "text": " to"}]])
@pytest.mark.parametrize("add_generation_prompt", [None, False])
def test_an_answer_can_be_continued_whatever_its_form(content: Any, add_generation_prompt: bool | None) -> None:
    messages = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": content}]
    with make_fake_llm() as llm:
        (output,) = llm.chat(
            messages,
            SamplingParams(max_tokens=1),
            continue_final_message=True,
            add_generation_prompt=add_generation_prompt,
        )
    assert output.prompt is not None and output.prompt.endswith("assistant\nAccording to")


def test_names_and_tool_results_reach_the_template() -> None:
    messages = [
        {"role": "user", "content": "Hi!", "name": "Ada"},
        {"role": "tool", "content": [{"type": "text", "text": "4"}, "2"], "tool_call_id": "call-1"},
    ]
    template = (
        "{% for m in messages %}{{ m.name }}|{{ m.tool_call_id }}|{{ m.content }}"
        "{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %};{% endfor %}"
    )
    with make_fake_llm() as llm:
        (output,) = llm.chat(messages, SamplingParams(max_tokens=1), chat_template=template)
    assert output.prompt == "Ada||Hi!;|call-1|42;"


# --- the demo model ---


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    with LLM("demo", dtype="float32", kv_cache_memory="64MiB") as llm:
        yield llm


def test_each_path_to_the_demo_model_tokenises_as_hugging_face_does(demo: LLM) -> None:
    hf = AutoTokenizer.from_pretrained(demo_folder(EngineConfig().cache_folder))
    one = SamplingParams(max_tokens=1)
    for text in ("Hello there", "<|im_start|>user\nHi<|im_end|>\n"):
        assert demo.generate(text, one)[0].prompt_token_ids == hf(text)["input_ids"]
    messages = [{"role": "user", "content": "Hi"}]
    (output,) = demo.chat(messages, one)
    assert output.prompt_token_ids == hf.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert output.prompt is not None and output.prompt.count("<|im_start|>system") == 1


KIT, TEN, SPACE_KITTEN, DESCRIBE, SPACE_DESCRIBE = 14838, 813, 42262, 48693, 5125


def test_a_bad_word_is_banned_with_and_without_a_space_before_it(demo: LLM) -> None:
    banned = GREEDY.replace(max_tokens=4, bad_words=["kitten", "describe"])

    def answer(*forced: int, prompt: Any = "I saw a") -> list[int]:
        bias = dict.fromkeys(forced, 100.0)
        return demo.generate(prompt, banned.replace(logit_bias=bias))[0].outputs[0].token_ids

    for whole in (SPACE_KITTEN, DESCRIBE, SPACE_DESCRIBE):
        assert whole not in answer(whole)
    assert answer(KIT) == [KIT] * 4, "part of a bad word is fine"
    assert answer(TEN) == [TEN] * 4
    assert answer(TEN, prompt=[KIT])[0] != TEN, "a bad word may begin in the prompt"
    free = demo.generate("I saw a", GREEDY.replace(max_tokens=4, logit_bias={SPACE_KITTEN: 100}))[0].outputs[0]
    assert free.token_ids == [SPACE_KITTEN] * 4


def test_the_words_of_a_banned_phrase_are_allowed_alone(demo: LLM) -> None:
    ids = {token_id for text in ("New York", " New York") for token_id in demo.tokenizer.encode(text)}
    for token_id in ids:
        params = GREEDY.replace(max_tokens=2, logit_bias={token_id: 100}, bad_words=["New York"])
        assert demo.generate("Go to", params)[0].outputs[0].token_ids == [token_id] * 2
