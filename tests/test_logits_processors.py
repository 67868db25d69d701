"""Callers' own logits processors: the tokens of transformers' `generate`, and nobody else's trouble."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor as HFProcessor
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation.logits_process import (
    MinLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from helpers_models import VOCAB_SIZE, make_model
from paged_backend import LLM, EngineError, InvalidRequestError, SamplingParams

NUM_NEW = 16
PROMPTS = [[5, 9, 5, 9, 5], [100, 3, 7, 200, 3, 7, 200, 3], [42]]
END = 77


class FavourMultiples(HFProcessor):
    """Knows how often it was called: multiples of that number are more likely."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.num_calls += 1
        bias = torch.zeros(scores.shape[-1])
        bias[:: self.num_calls + 1] = 4.0
        return scores + bias  # type: ignore[return-value]


def favour_length(input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
    scores[:, input_ids.shape[1] :: 3] += 3.0  # in place, which is allowed
    return scores


class Failure(Exception):
    """What a processor raises on purpose."""


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_model("llama")


def make_llm(model: PreTrainedModel, **settings: Any) -> LLM:
    return LLM(model, **{"block_size": 4, "kv_cache_memory": "16MiB"} | settings)


def greedy(*processors: Any, **params: Any) -> SamplingParams:
    options = {"temperature": 0, "max_tokens": NUM_NEW, "ignore_eos": True} | params
    return SamplingParams(logits_processors=processors, **options)


@torch.inference_mode()
def generated(model: PreTrainedModel, prompt: list[int], *processors: Any, **options: Any) -> list[int]:
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=NUM_NEW,
        do_sample=False,
        eos_token_id=None,
        logits_processor=LogitsProcessorList(copy.deepcopy(processors)),
        **options,
    )
    return output[0, len(prompt) :].tolist()


def token_ids(llm: LLM, prompts: Any, params: Any) -> list[list[int]]:
    return [sample.token_ids for output in llm.generate(prompts, params) for sample in output.outputs]


def only(token_id: int) -> Callable[[list[int], torch.Tensor], torch.Tensor]:
    return lambda output_ids, logits: torch.full_like(logits, -torch.inf).index_fill_(0, torch.tensor(token_id), 0.0)


@pytest.mark.parametrize(
    "processors",
    [
        [RepetitionPenaltyLogitsProcessor(1.8)],
        [NoRepeatNGramLogitsProcessor(2)],
        [NoBadWordsLogitsProcessor([[229], [20, 87]], eos_token_id=END)],
        [MinLengthLogitsProcessor(12, END, device="cpu")],
        [FavourMultiples()],
        [favour_length],
        [RepetitionPenaltyLogitsProcessor(1.3), FavourMultiples(), NoRepeatNGramLogitsProcessor(2), favour_length],
    ],
    ids=lambda processors: "+".join(getattr(one, "__name__", type(one).__name__) for one in processors),
)
def test_transformers_processors_give_the_tokens_of_generate(model: PreTrainedModel, processors: list[Any]) -> None:
    expected = [generated(model, prompt, *processors) for prompt in PROMPTS]
    assert expected != [generated(model, prompt) for prompt in PROMPTS]
    for settings in ({}, {"max_num_batched_tokens": 3}, {"num_gpu_blocks_override": 11}):
        with make_llm(model, **settings) as llm:
            assert token_ids(llm, PROMPTS, greedy(*processors)) == expected
            stats = llm.stats()
        assert (stats.num_preemptions > 0) == ("num_gpu_blocks_override" in settings)


def test_they_run_where_generate_runs_them_between_its_own_penalties_and_temperature(model: PreTrainedModel) -> None:
    expected = [generated(model, prompt, FavourMultiples(), repetition_penalty=1.5) for prompt in PROMPTS]
    with make_llm(model) as llm:
        assert token_ids(llm, PROMPTS, greedy(FavourMultiples(), repetition_penalty=1.5)) == expected
        seen: list[torch.Tensor] = []
        for temperature in (0.0, 2.0):
            params = greedy(lambda ids, logits: seen.append(logits.clone()) or logits, max_tokens=1)
            llm.generate(PROMPTS[:1], params.replace(temperature=temperature, top_k=5))
    assert torch.equal(*seen)


def test_functions_get_the_output_so_far_and_the_prompt_if_they_take_three_arguments(model: PreTrainedModel) -> None:
    seen: list[tuple[Any, ...]] = []

    def two(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append((list(output_ids), logits.dtype, tuple(logits.shape)))
        return logits

    def three(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append((list(prompt_ids), list(output_ids)))
        return logits

    with make_llm(model) as llm:
        ids = token_ids(llm, PROMPTS[:1], greedy(two, three, max_tokens=3))[0]
    prompt = PROMPTS[0]
    assert seen == [item for i in range(3) for item in ((ids[:i], torch.float32, (VOCAB_SIZE,)), (prompt, ids[:i]))], (
        "each once per token, in order"
    )


def test_each_sample_has_its_own_copy_of_a_processor_that_keeps_state(model: PreTrainedModel) -> None:
    processor = FavourMultiples()
    expected = [generated(model, prompt, processor) for prompt in PROMPTS]
    with make_llm(model) as llm:
        assert token_ids(llm, PROMPTS, greedy(processor, n=3)) == [ids for ids in expected for _ in range(3)]
    assert processor.num_calls == 0


def test_a_model_that_a_processor_holds_is_not_copied(model: PreTrainedModel) -> None:
    class Guided(HFProcessor):
        def __init__(self) -> None:
            self.model = model
            self.device = model.device

        def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
            assert self.model is model
            return scores + self.model(input_ids=input_ids, use_cache=False).logits[:, -1]

    with make_llm(model) as llm:
        assert token_ids(llm, PROMPTS[:1], greedy(Guided())) == [generated(model, PROMPTS[0])]


def test_a_processor_with_a_method_clone_is_cloned_for_each_sample(model: PreTrainedModel) -> None:
    clones: list[Countdown] = []

    class Countdown:
        def __init__(self) -> None:
            self.next_id = 100

        def clone(self) -> Countdown:
            clones.append(Countdown())
            return clones[-1]

        def __call__(self, token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            self.next_id -= 1
            return only(self.next_id)(token_ids, logits)

    with make_llm(model) as llm:
        samples = token_ids(llm, PROMPTS[:1], greedy(Countdown(), n=2, max_tokens=3))
    assert samples == [[99, 98, 97]] * 2
    assert len(clones) == 2


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (lambda output_ids, logits: None, "returned NoneType"),
        (lambda output_ids, logits: logits[:-1], r"shape \(271,\).*shape \(272,\)"),
        (lambda input_ids, scores: scores[0], r"shape \(272,\).*shape \(1, 272\)"),
    ],
)
def test_what_is_no_row_of_logits_fails_the_request(model: PreTrainedModel, processor: Any, message: str) -> None:
    with make_llm(model) as llm, pytest.raises(EngineError, match=message):
        llm.generate(PROMPTS[:1], greedy(processor))


@pytest.mark.parametrize("when", [0, 4])
def test_an_exception_fails_its_request_alone_and_keeps_its_cause(model: PreTrainedModel, when: int) -> None:
    def fail(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits.fill_(-1.0)
        if len(output_ids) == when:
            raise Failure("on purpose")
        return logits

    with make_llm(model) as llm:
        before, broken, after = (
            llm.submit(prompt, params)
            for prompt, params in zip(PROMPTS, (greedy(), greedy(fail, n=2), greedy()), strict=True)
        )
        with pytest.raises(EngineError, match="could not be chosen: Failure: on purpose") as caught:
            broken.result(20)
        assert isinstance(caught.value.__cause__, Failure)
        results = [handle.result(20).outputs[0].token_ids for handle in (before, after)]
        stats = llm.stats()
    assert results == [generated(model, PROMPTS[0]), generated(model, PROMPTS[2])]
    assert stats.num_free_blocks == stats.num_blocks
    assert stats.failed == {"EngineError": 1}


def ban_all(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    return torch.full_like(logits, -torch.inf)


@pytest.mark.parametrize("options", [{}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.1}])
def test_where_all_is_banned_the_lowest_allowed_id_is_taken_or_else_0(
    model: PreTrainedModel, options: dict[str, Any]
) -> None:
    params = [
        SamplingParams(logits_processors=[ban_all], seed=1, max_tokens=NUM_NEW, ignore_eos=True, **options, **ids)
        for ids in ({}, {"allowed_token_ids": [9, 7]})
    ]
    with make_llm(model) as llm:
        assert token_ids(llm, PROMPTS[:2], params) == [[0] * NUM_NEW, [7] * NUM_NEW]


def test_rows_without_processors_are_untouched_beside_one_that_has_them(model: PreTrainedModel) -> None:
    params = [greedy(), greedy(only(9)), greedy(repetition_penalty=1.5)]
    with make_llm(model) as llm:
        alone = [token_ids(llm, [prompt], one)[0] for prompt, one in zip(PROMPTS, params, strict=True)]
        assert token_ids(llm, PROMPTS, params) == alone
    assert alone[1] == [9] * NUM_NEW


@pytest.mark.parametrize("bad", [5, [5], ["x"], [lambda: None], [lambda a, b, c, d: None], lambda ids, logits: logits])
def test_what_can_never_be_called_is_refused_at_once(bad: Any) -> None:
    with pytest.raises(InvalidRequestError, match="logits_processors"):
        SamplingParams(logits_processors=bad)


def test_transformers_processors_are_recognised_without_importing_it() -> None:
    code = (
        "import sys; from paged_backend import SamplingParams; "
        "SamplingParams(logits_processors=[lambda ids, logits: logits]); "
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert completed.stdout.strip() == "set()", completed.stderr
