"""Streamers, stopping criteria, the caller's own processors, and what is handed over to transformers."""

from __future__ import annotations

import asyncio
import copy
import inspect
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AsyncTextIteratorStreamer,
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.generation.streamers import BaseStreamer

from helpers import is_idle, num_ended, wait_until
from helpers_models import make_model, make_tokenizer
from helpers_transformers import Held, cases, encoded, engine_of, on_engine, own_generate, same
from paged_backend import EngineError
from transformers_paged.model import PagedGenerate

ENDS = [143, 226, 206]
TOKENIZER = make_tokenizer()


@pytest.fixture(scope="module")
def llama() -> Iterator[PreTrainedModel]:
    """Enabled; what the engine cannot do is an error."""
    with on_engine(make_model("llama")) as model:
        yield model


@pytest.fixture(scope="module")
def falling_back(llama: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Another model, which falls back."""
    with on_engine(copy.deepcopy(llama), on_unsupported="fallback") as model:
        yield model


class Recorder(BaseStreamer):  # type: ignore[misc]
    """Notes what it is given."""

    def __init__(self, fail_at: int = 10**9) -> None:
        self.calls: list[Any] = []
        self._fail_at = fail_at

    def put(self, value: Tensor) -> None:
        assert value.device.type == "cpu"
        self.calls.append(value.tolist())
        if len(self.calls) == self._fail_at:
            raise ConnectionResetError("the reader has gone")

    def end(self) -> None:
        self.calls.append("end")


class EndsWith(StoppingCriteria):  # type: ignore[misc]
    """Rows stop after a token."""

    def __init__(self, token: int, *, all_rows: bool = False) -> None:
        self._token, self._all_rows = token, all_rows

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        is_done = input_ids[:, -1] == self._token
        return is_done.any().expand(len(is_done)) if self._all_rows else is_done


class ScoresAbove(StoppingCriteria):  # type: ignore[misc]
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.stack(scores).amax(dim=(0, 2)) > 3.9


class Boost(LogitsProcessor):  # type: ignore[misc]
    """Makes each next token depend on the number of ids that the row has."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, 60 + input_ids.shape[1] % 30] += 3.0
        return scores


CRITERIA: dict[str, dict[str, Any]] = {
    "one row": {"stopping_criteria": [EndsWith(51)]},
    "one row, no eos": {"stopping_criteria": [EndsWith(51), EndsWith(206), EndsWith(143)], "eos_token_id": None},
    "all rows": {"stopping_criteria": StoppingCriteriaList([EndsWith(153, all_rows=True)])},
    "max length": {"stopping_criteria": [MaxLengthCriteria(31)]},
    "on scores": {
        "stopping_criteria": [ScoresAbove()],
        **dict.fromkeys(("return_dict_in_generate", "output_scores"), True),
    },
    "no time": {"max_time": 1e-9},
    "stop string": {"stop_strings": ["j", "3"], "tokenizer": TOKENIZER},
    "stop string of several tokens": {"stop_strings": ["CC", "dd"], "tokenizer": TOKENIZER},
    "stop string that begins in the prompt": {
        "stop_strings": ["e\x0c", "at"],
        "tokenizer": TOKENIZER,
        "sequence_bias": {(116,): 50.0},
    },
    "stop string and eos": {"stop_strings": ["3"], "tokenizer": TOKENIZER, "eos_token_id": ENDS},
}


@pytest.mark.parametrize("case", cases(CRITERIA, everyday="one row, no eos, stop string and eos, no time"))
def test_rows_stop_where_they_stop_in_transformers(llama: PreTrainedModel, case: str) -> None:
    arguments = encoded() | {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 3} | CRITERIA[case]
    unstopped = arguments | {"stopping_criteria": None, "max_time": None, "stop_strings": None}
    right, longest = own_generate(llama, **arguments), own_generate(llama, **unstopped)
    output = llama.generate(**arguments)
    if arguments.get("return_dict_in_generate"):
        right, longest, output = right.sequences, longest.sequences, output.sequences
    assert same(output, right)
    assert not same(output, longest), "something must stop"


def test_what_stops_early_is_aborted(llama: PreTrainedModel) -> None:
    arguments = encoded(["a"]) | {"max_new_tokens": 400, "do_sample": False, "eos_token_id": None, "pad_token_id": 3}
    before = engine_of(llama).stats().num_steps
    llama.generate(**arguments, stopping_criteria=[EndsWith(116)])
    wait_until(lambda: is_idle(engine_of(llama).stats()))
    assert engine_of(llama).stats().num_steps - before < 200


@pytest.mark.parametrize(
    "arguments",
    [
        {"logits_processor": [Boost()]},
        {"logits_processor": LogitsProcessorList([Boost()]), "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"logits_processor": [MinLengthLogitsProcessor(30, ENDS)], "min_length": 5, "eos_token_id": ENDS},
        {"logits_processor": [lambda input_ids, scores: -scores]},
        {"logits_processor": [Boost()], "do_sample": True, "top_k": 1},
    ],
)
def test_the_callers_own_processors_see_each_row(llama: PreTrainedModel, arguments: dict[str, Any]) -> None:
    arguments = encoded() | {"max_new_tokens": 10, "do_sample": False} | arguments
    right = own_generate(llama, **arguments)
    assert same(llama.generate(**arguments), right)


def test_an_error_in_a_processor_is_raised_as_it_was(llama: PreTrainedModel) -> None:
    def fail(input_ids: Tensor, scores: Tensor) -> Tensor:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine") as error:
        llama.generate(**encoded(), max_new_tokens=4, logits_processor=[fail])
    assert not isinstance(error.value, EngineError)
    wait_until(lambda: is_idle(engine_of(llama).stats()))


@pytest.mark.parametrize("texts", [["Once upon a time"], ["Once upon a time", "a", "How do you do, my friend?"]])
@pytest.mark.parametrize("more", [{}, {"eos_token_id": ENDS}, {"max_new_tokens": 1}])
def test_a_streamer_gets_what_transformers_would_give_it(
    llama: PreTrainedModel, texts: list[str], more: dict[str, Any]
) -> None:
    arguments = encoded(texts) | {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 3} | more
    right, streamed = Recorder(), Recorder()
    expected = own_generate(llama, **arguments, streamer=right)
    assert same(llama.generate(**arguments, streamer=streamed), expected)
    assert streamed.calls == right.calls


@pytest.mark.parametrize("skip_prompt", [True, False])
def test_text_streamers_print_the_text(
    llama: PreTrainedModel, skip_prompt: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = encoded(["Once upon a time"]) | {"max_new_tokens": 9, "do_sample": False}
    own_generate(llama, **arguments, streamer=TextStreamer(TOKENIZER, skip_prompt=skip_prompt))
    right = capsys.readouterr().out
    llama.generate(**arguments, streamer=TextStreamer(TOKENIZER, skip_prompt=skip_prompt))
    assert capsys.readouterr().out == right


def test_a_text_streamer_takes_one_row_and_says_so(llama: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="batch size 1"):
        llama.generate(**encoded(), max_new_tokens=3, streamer=TextIteratorStreamer(TOKENIZER))


def test_tokens_are_streamed_while_they_are_generated(llama: PreTrainedModel) -> None:
    streamer = TextIteratorStreamer(TOKENIZER, skip_prompt=True, timeout=20)
    arguments = encoded(["a"]) | {"max_new_tokens": 150, "eos_token_id": None, "pad_token_id": 3, "do_sample": False}
    thread = threading.Thread(target=llama.generate, kwargs=arguments | {"streamer": streamer}, daemon=True)
    thread.start()
    next(iter(streamer))
    was_running = not is_idle(engine_of(llama).stats())
    text = "".join(streamer)
    thread.join(20)
    assert was_running and text


async def test_async_streams_end() -> None:
    with on_engine(make_model("llama")) as model:
        streamer = AsyncTextIteratorStreamer(TOKENIZER, skip_prompt=True, timeout=20)
        arguments = encoded(["a"]) | {"max_new_tokens": 8, "do_sample": False, "streamer": streamer}
        task = asyncio.create_task(asyncio.to_thread(model.generate, **arguments))
        text = "".join([piece async for piece in streamer])
        output = await task
    assert text == TOKENIZER.decode(output[0, 1:])


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_new_token": 3},
        {"max_new_tokens": 0},
        {"input_ids": torch.tensor([[10_000]]), "attention_mask": torch.tensor([[1]])},
        {"guidance_scale": 2.0},
        {"logits_processor": [lambda input_ids, scores: scores[:, :1]]},
        {"stopping_criteria": [lambda input_ids, scores: 1 / 0]},
        {"num_beams": 2},
    ],
)
def test_a_streams_reader_never_waits_for_ever(llama: PreTrainedModel, arguments: dict[str, Any]) -> None:
    """transformers#22576"""
    streamer = TextIteratorStreamer(TOKENIZER, timeout=20)
    with pytest.raises(Exception):  # noqa: B017 - each raises its own
        llama.generate(**encoded(["a"]) | {"max_new_tokens": 4} | arguments, streamer=streamer)
    list(streamer)


def test_an_error_in_a_streamer_aborts_and_ends_it(llama: PreTrainedModel) -> None:
    before = num_ended(engine_of(llama).stats())
    streamer = Recorder(fail_at=4)
    with Held() as arguments, pytest.raises(ConnectionResetError):
        llama.generate(**encoded(["a"]), **arguments, streamer=streamer)
    assert (len(streamer.calls), streamer.calls[-1]) == (5, "end")
    wait_until(lambda: is_idle(engine_of(llama).stats()))
    assert num_ended(engine_of(llama).stats()) == before


def test_a_slow_streamer_holds_up_nobody_else(llama: PreTrainedModel) -> None:
    class Slow(Recorder):
        def put(self, value: Tensor) -> None:
            super().put(value)
            if len(self.calls) == 2:
                go_on.wait(20)

    go_on, slow = threading.Event(), Slow()
    arguments = encoded(["a"]) | {"max_new_tokens": 20, "do_sample": False}
    thread = threading.Thread(target=llama.generate, kwargs=arguments | {"streamer": slow}, daemon=True)
    thread.start()
    wait_until(lambda: len(slow.calls) == 2)
    assert same(llama.generate(**arguments), own_generate(llama, **arguments))
    go_on.set()
    thread.join(20)
    assert slow.calls[-1] == "end"


def assisted() -> dict[str, Any]:
    return {"assistant_model": make_model("llama", seed=1)}


def with_cache() -> dict[str, Any]:
    return {"cache": DynamicCache()}


HANDED_OVER: dict[str, Any] = {
    "output_attentions": lambda: {"output_attentions": True, "return_dict_in_generate": True},
    "output_hidden_states": lambda: {"output_hidden_states": True, "return_dict_in_generate": True},
    "guidance_scale": lambda: {"guidance_scale": 1.5},
    "assistant_model": assisted,
    "prompt_lookup_num_tokens": lambda: {"prompt_lookup_num_tokens": 3},
    "cache_implementation": lambda: {"cache_implementation": "static"},
    "cache": with_cache,
    "custom_generate": lambda: {"custom_generate": type(make_model("llama"))._sample},
    "position_ids": lambda: {"position_ids": torch.arange(25).expand(3, 25)},
    "beams that sample": lambda: {"num_beams": 2, "do_sample": True, "top_k": 1},
    "beams with processors": lambda: {"num_beams": 2, "no_repeat_ngram_size": 2},
    "beams with criteria": lambda: {"num_beams": 2, "stop_strings": ["x"], "tokenizer": TOKENIZER},
    "beams with scores": lambda: {"num_beams": 2, "return_dict_in_generate": True},
    "more than fits": lambda: {"max_new_tokens": 600, "eos_token_id": [12, 116, 244]},
}


@pytest.mark.parametrize("case", cases(HANDED_OVER, everyday="output_attentions, cache, more than fits"))
def test_what_the_engine_cannot_do_runs_in_transformers_or_is_refused(
    llama: PreTrainedModel, falling_back: PreTrainedModel, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = encoded() | {"max_new_tokens": 5, "do_sample": False}
    if case in ("assistant_model", "prompt_lookup_num_tokens"):
        arguments |= encoded(["a"])
    right = own_generate(falling_back, **arguments | HANDED_OVER[case]())
    output = falling_back.generate(**arguments | HANDED_OVER[case]())
    with pytest.raises(NotImplementedError) as refusal:
        llama.generate(**arguments | HANDED_OVER[case]())

    assert type(output) is type(right)
    assert same(getattr(output, "sequences", output), getattr(right, "sequences", right))
    ours = [record for record in caplog.records if record.name == "transformers_paged.model"]
    assert len(ours) == 1
    assert ours[0].getMessage().partition(": ")[2] == str(refusal.value).partition("; with on_unsupported")[0]


def test_embeddings_are_handed_over(falling_back: PreTrainedModel) -> None:
    embeddings = falling_back.get_input_embeddings()(encoded(["abc"])["input_ids"])
    arguments = {"inputs_embeds": embeddings, "max_new_tokens": 5, "do_sample": False}
    assert same(falling_back.generate(**arguments), own_generate(falling_back, **arguments))


def test_none_for_a_cache_asks_for_nothing(llama: PreTrainedModel) -> None:
    arguments = encoded() | {"max_new_tokens": 4, "do_sample": False}
    for more in ({"cache": None}, {"assistant_model": None}, {"cache_implementation": "paged"}, {"synced_gpus": False}):
        assert same(llama.generate(**arguments, **more), own_generate(llama, **arguments))


def test_generate_takes_the_arguments_of_transformers_generate(llama: PreTrainedModel) -> None:
    right = list(inspect.signature(type(llama).generate).parameters)[1:]
    assert list(inspect.signature(PagedGenerate.__call__).parameters)[1:] == right


def test_an_interrupted_call_aborts_its_requests(llama: PreTrainedModel) -> None:
    before = num_ended(engine_of(llama).stats())

    class Interrupt(StoppingCriteria):  # type: ignore[misc]
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            raise KeyboardInterrupt

    start = time.monotonic()
    with Held() as arguments, pytest.raises(KeyboardInterrupt):
        llama.generate(**encoded(), **arguments, stopping_criteria=[Interrupt()])
    wait_until(lambda: is_idle(engine_of(llama).stats()))
    assert num_ended(engine_of(llama).stats()) == before
    assert time.monotonic() - start < 20
