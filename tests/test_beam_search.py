"""Beam search gives the outputs and scores of transformers' `generate(num_beams=...)`, whatever the engine does."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from helpers import is_idle
from helpers_models import VOCAB_SIZE, make_model, make_tokenizer
from paged_backend import LLM, BeamSearchParams, CompletionOutput, EngineConfig, InvalidRequestError, SamplingParams
from paged_backend.model.demo import demo_folder

PAD = VOCAB_SIZE - 1
SETTINGS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "chunked": {"max_num_batched_tokens": 3},
    "preempted": {"num_gpu_blocks_override": 16},
    "few at a time": {"max_num_seqs": 2},
    "no prefix cache": {"enable_prefix_caching": False, "num_gpu_blocks_override": 16},
}


def random_prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def make_llm(model: PreTrainedModel, eos: list[int], **settings: Any) -> LLM:
    model.generation_config.eos_token_id = eos
    return LLM(model, make_tokenizer(), **{"block_size": 4, "kv_cache_memory": "16MiB"} | settings)


@torch.inference_mode()
def likely_ids(model: PreTrainedModel, num: int) -> list[int]:
    """The tokens that the model likes best after many contexts: as end tokens, they end many outputs."""
    (prompt,) = random_prompts(60, seed=5)
    probabilities = model(torch.tensor([prompt])).logits[0].softmax(-1).sum(0)
    return probabilities.topk(num).indices.tolist()


def unpadded(token_ids: list[int]) -> list[int]:
    """Without the padding at the end; within an output, PAD is a token like others."""
    while token_ids[-1] == PAD:
        token_ids = token_ids[:-1]
    return token_ids


@torch.inference_mode()
def generated(
    model: PreTrainedModel, prompt: list[int], eos: list[int] | None, params: BeamSearchParams, **others: Any
) -> list[tuple[list[int], float]]:
    """The best outputs of `generate`, with their scores."""
    options = {} if params.beam_width == 1 else {"length_penalty": params.length_penalty}
    result = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=params.beam_width,
        num_return_sequences=params.n or params.beam_width,
        early_stopping=False if params.beam_width == 1 else params.early_stopping,
        max_new_tokens=params.max_tokens,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=PAD,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
        **others,
    )
    tokens = [unpadded(row[len(prompt) :].tolist()) for row in result.sequences]
    if params.beam_width == 1:
        return [(tokens[0], float(model.compute_transition_scores(result.sequences, result.scores).sum()))]
    return list(zip(tokens, result.sequences_scores.tolist(), strict=True))


def check(outputs: list[CompletionOutput], right: list[tuple[list[int], float]], *, scores: bool = True) -> None:
    assert [output.token_ids for output in outputs] == [token_ids for token_ids, _ in right]
    assert [output.index for output in outputs] == list(range(len(right)))
    if scores:
        assert [output.score for output in outputs] == pytest.approx([score for _, score in right], rel=1e-5, abs=1e-4)


GRID = list(itertools.product((2, 4, 8), (0.0, 1.0, 2.0, -1.0), (False, True, "never"), (1, 3, 12)))


@pytest.mark.parametrize("num_ends", [1, 3, 60])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2", "mistral"])
def test_beams_are_those_of_generate(architecture: str, num_ends: int) -> None:
    check_against_generate(architecture, num_ends, num_combinations=2)


@pytest.mark.slow
@pytest.mark.parametrize("num_ends", [1, 3, 60])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2", "mistral", "gpt_oss", "qwen3"])
def test_many_beams_are_those_of_generate(architecture: str, num_ends: int) -> None:
    check_against_generate(architecture, num_ends, num_combinations=12)


def check_against_generate(architecture: str, num_ends: int, *, num_combinations: int) -> None:
    model = make_model(architecture)
    eos = likely_ids(model, num_ends)
    prompts = random_prompts(5, 18)
    combinations = random.Random(architecture + str(num_ends)).sample(GRID, num_combinations)
    with make_llm(model, eos) as llm:
        for width, length_penalty, early_stopping, max_tokens in combinations:
            params = BeamSearchParams(
                beam_width=width, length_penalty=length_penalty, early_stopping=early_stopping, max_tokens=max_tokens
            )
            for prompt, output in zip(prompts, llm.beam_search(prompts, params), strict=True):
                check(output.outputs, generated(model, prompt, eos, params))
        assert is_idle(llm.stats())


def test_one_beam_is_greedy_decoding() -> None:
    model = make_model("llama")
    (prompt,) = random_prompts(9)
    params = BeamSearchParams(beam_width=1, length_penalty=0.0, early_stopping="never", max_tokens=12)
    for eos in ([PAD], likely_ids(model, 3), likely_ids(model, 60)):
        with make_llm(model, eos) as llm:
            right = generated(model, prompt, eos, params)
            check(llm.beam_search(prompt, params)[0].outputs, right, scores=False)


def test_every_setting_gives_the_same_beams_beside_sampled_requests() -> None:
    model = make_model("llama")
    eos = likely_ids(model, 3)
    prompts = random_prompts(5, 18, 1)
    params = [BeamSearchParams(beam_width=width, max_tokens=11) for width in (3, 2, 4)]
    right = [generated(model, prompt, eos, one) for prompt, one in zip(prompts, params, strict=True)]
    sampling = SamplingParams(n=2, seed=1, max_tokens=16, ignore_eos=True)
    with make_llm(model, eos) as llm:
        alone = llm.generate(prompts, sampling)
    for name, settings in SETTINGS.items():
        with make_llm(model, eos, **settings) as llm:
            others = [llm.submit(prompt, sampling) for prompt in prompts]
            for output, beams in zip(llm.beam_search(prompts, params), right, strict=True):
                check(output.outputs, beams)
            for other, output in zip(others, alone, strict=True):
                samples = other.result(timeout=20).outputs
                assert [s.token_ids for s in samples] == [s.token_ids for s in output.outputs], name
            stats = llm.stats()
        assert is_idle(stats), name
        if "num_gpu_blocks_override" in settings:
            assert stats.num_preemptions > 0, name


def test_beams_are_not_speculated_on() -> None:
    model = make_model("llama")
    prompt, allowed = [5, 6, 7] * 6, [5, 6, 7]  # whatever comes next was there before, and so is guessed on
    params = BeamSearchParams(beam_width=3, max_tokens=11, allowed_token_ids=allowed)
    with make_llm(model, [PAD]) as llm:
        right = llm.beam_search(prompt, params)[0].outputs
    with make_llm(model, [PAD], speculative_config={"prompt_lookup_min": 1}) as llm:
        assert llm.beam_search(prompt, params)[0].outputs == right
        assert llm.stats().num_draft_tokens == 0
        llm.generate(prompt, SamplingParams(max_tokens=11, allowed_token_ids=allowed))
        assert llm.stats().num_draft_tokens > 0  # or the prompt would show nothing


def test_the_best_n_come_back() -> None:
    model = make_model("llama")
    eos = likely_ids(model, 3)
    (prompt,) = random_prompts(7)
    params = BeamSearchParams(beam_width=4, n=2, max_tokens=8)
    with make_llm(model, eos) as llm:
        few, whole = (
            llm.beam_search(prompt, one)[0].outputs for one in (params, BeamSearchParams(beam_width=4, max_tokens=8))
        )
    check(few, generated(model, prompt, eos, params))
    assert [output.token_ids for output in few] == [output.token_ids for output in whole[:2]]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
        ({"min_tokens": 5}, {"min_new_tokens": 5}),
        ({"min_tokens": 4, "repetition_penalty": 0.8}, {"min_new_tokens": 4, "repetition_penalty": 0.8}),
        ({"logit_bias": {3: -100, 40: 2.5}}, {"sequence_bias": [[[3], float("-inf")], [[40], 2.5]]}),
    ],
)
def test_penalties_and_constraints_act_on_log_probabilities_as_in_generate(
    ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    model = make_model("llama")
    eos = likely_ids(model, 20)
    prompts = random_prompts(6, 15)
    params = BeamSearchParams(beam_width=3, max_tokens=10, **ours)
    with make_llm(model, eos) as llm:
        for prompt, output in zip(prompts, llm.beam_search(prompts, params), strict=True):
            check(output.outputs, generated(model, prompt, eos, params, **theirs))


def test_end_tokens_may_be_ignored_and_others_named() -> None:
    model = make_model("llama")
    eos = likely_ids(model, 10)
    (prompt,) = random_prompts(7)
    params = BeamSearchParams(beam_width=3, max_tokens=9, ignore_eos=True)
    with make_llm(model, eos) as llm:
        ignoring = llm.beam_search(prompt, params)[0].outputs
        naming = llm.beam_search(
            prompt, BeamSearchParams(beam_width=3, max_tokens=9, ignore_eos=True, stop_token_ids=eos)
        )[0].outputs
    check(ignoring, generated(model, prompt, None, params))
    assert {output.finish_reason for output in ignoring} == {"length"}
    check(naming, generated(model, prompt, eos, params))
    for output in naming:
        if output.finish_reason == "stop":
            assert output.stop_reason == output.token_ids[-1]
    assert "stop" in {output.finish_reason for output in naming}


def test_scores_count_generated_tokens_only() -> None:
    """The length of the prompt once counted, so that all scores of long prompts were about equal."""
    model = make_model("llama")
    eos = likely_ids(model, 3)
    (prompt,) = random_prompts(100)
    params = BeamSearchParams(beam_width=2, max_tokens=10)
    with make_llm(model, eos) as llm:
        outputs = llm.beam_search(prompt, params)[0].outputs
        scored = llm.score(prompt, [output.token_ids for output in outputs])[0]
    check(outputs, generated(model, prompt, eos, params))
    for output, score in zip(outputs, scored, strict=True):
        assert output.cumulative_logprob == pytest.approx(score.logprob, abs=1e-4)
        assert output.score == pytest.approx(score.logprob / len(output.token_ids), abs=1e-4)


def test_outputs_have_text_without_the_end_token() -> None:
    model = make_model("llama")
    eos = likely_ids(model, 20)
    with make_llm(model, eos) as llm:
        (result,) = llm.beam_search("A prompt", BeamSearchParams(beam_width=4, max_tokens=10))
        again = asyncio.run(llm.abeam_search("A prompt", BeamSearchParams(beam_width=4, max_tokens=10)))[0]
        assert (result.prompt, result.finished) == ("A prompt", True)
        for output in result.outputs:
            kept = output.token_ids[:-1] if output.finish_reason == "stop" else output.token_ids
            assert output.text == llm.tokenizer.decode(kept)
    assert [output.text for output in again.outputs] == [output.text for output in result.outputs]
    assert result.metrics is not None and result.metrics.first_token_time is not None


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_beams_of_the_demo_model_are_those_of_generate() -> None:
    folder = demo_folder(EngineConfig().cache_folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    full_stop = tokenizer.encode(".")  # which ends most outputs before their 16 tokens
    prompts = ["The capital of France is", "My favourite season is"]
    with LLM("demo", dtype="float32", kv_cache_memory="256MiB", num_gpu_blocks_override=24) as llm:
        for width, length_penalty in ((2, 1.0), (4, 0.0)):
            params = BeamSearchParams(
                beam_width=width, length_penalty=length_penalty, max_tokens=16, stop_token_ids=full_stop
            )
            for prompt, output in zip(prompts, llm.beam_search(prompts, params), strict=True):
                eos = [*full_stop, tokenizer.eos_token_id]
                check(output.outputs, generated(model, output.prompt_token_ids, eos, params))
                assert output.prompt == prompt
        assert is_idle(llm.stats())


# --- refusals ---


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"beam_width": 0}, "beam_width=0 is out of range"),
        ({"beam_width": 2, "n": 3}, "n=3 is out of range: it must be an integer from 1 to 2"),
        ({"beam_width": 2, "max_tokens": 0}, "max_tokens=0"),
        ({"beam_width": 2, "length_penalty": float("nan")}, "length_penalty=nan"),
        ({"beam_width": 2, "early_stopping": "always"}, "True, False or 'never'"),
        ({"beam_width": 2, "early_stopping": 1}, "True, False or 'never'"),
        ({"beam_width": 2, "temperature": 0.7}, "temperature=0.7"),
        ({"beam_width": 2, "min_tokens": 9}, "min_tokens=9"),
        ({"beam_width": 2, "repetition_penalty": 0}, "repetition_penalty=0"),
        ({"beam_width": 2, "num_beams": 3}, "has no argument 'num_beams'"),
    ],
)
def test_impossible_parameters_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        BeamSearchParams(**{"max_tokens": 4} | fields)


def test_impossible_requests_are_refused_with_their_numbers() -> None:
    with make_llm(make_model("llama"), [PAD], num_gpu_blocks_override=16) as llm:
        with pytest.raises(InvalidRequestError, match=r"beam_width=8 .* need 18 blocks, .* holds 16"):
            llm.beam_search([1] * 8, BeamSearchParams(beam_width=8, max_tokens=8))
        assert len(llm.beam_search([1] * 8, BeamSearchParams(beam_width=7, max_tokens=8))[0].outputs) == 7
        with pytest.raises(InvalidRequestError, match="must be a BeamSearchParams"):
            llm.beam_search("a", SamplingParams())  # type: ignore[arg-type]
        for call in (llm.generate, llm.stream, llm.submit):
            with pytest.raises(InvalidRequestError, match=r"is for beam_search\(\)"):
                call("a", BeamSearchParams(beam_width=2, max_tokens=2))  # type: ignore[operator]
        assert is_idle(llm.stats())
