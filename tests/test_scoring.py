"""`LLM.score`: log-probabilities of given continuations, whatever the engine does to get them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as BackendTokenizer
from transformers import PreTrainedTokenizerFast

from helpers import is_idle, logprob_of, make_engine, make_request
from helpers import make_llm as make_fake_llm
from helpers_models import BOS, VOCAB_SIZE, crowded, make_model, make_tokenizer
from paged_backend import LLM, InvalidRequestError, SamplingParams, ScoreOutput
from paged_backend.chat.tokenizer import Tokenizer
from paged_backend.scoring import Pair, pair_of

SETTINGS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "chunked": {"max_num_batched_tokens": 5},
    "no prefix cache": {"enable_prefix_caching": False},
}


def random_ids(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()


def make_llm(model: Any, **settings: Any) -> LLM:
    return LLM(model, make_tokenizer(), **{"block_size": 4, "kv_cache_memory": "16MiB"} | settings)


@torch.inference_mode()
def expected(model: Any, prompt: list[int], continuation: list[int]) -> tuple[list[float], bool]:
    """Log-probabilities by transformers' model, and whether each token is its argmax."""
    logits = model(torch.tensor([prompt + continuation])).logits[0, len(prompt) - 1 : -1]
    log_probs = logits.log_softmax(-1).gather(1, torch.tensor(continuation)[:, None])[:, 0]
    return log_probs.tolist(), logits.argmax(-1).tolist() == continuation


def take_time(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    time.sleep(0.003)
    return logits


def check(score: ScoreOutput, model: Any, prompt: list[int], continuation: list[int]) -> None:
    logprobs, is_greedy = expected(model, prompt, continuation)
    assert score.token_ids == tuple(continuation) and score.num_tokens == len(continuation)
    assert score.logprobs == pytest.approx(logprobs, abs=1e-4)
    assert score.logprob == pytest.approx(sum(logprobs), abs=1e-4 * len(logprobs))
    assert (score.is_greedy, score.num_prompt_tokens) == (is_greedy, len(prompt))


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2"])
def test_scores_are_the_models_log_probabilities_in_every_setting(architecture: str) -> None:
    model = make_model(architecture)
    prompts = [random_ids(length, seed=length) for length in (1, 4, 22, 39)]
    continuations = [[random_ids(length, seed=10 * length) for length in (1, 3, 12)] for _ in prompts]
    for name, settings in (SETTINGS | {"preempted": crowded(architecture, 16, 39 + 12)}).items():
        with make_llm(model, **settings) as llm:
            slow = SamplingParams(max_tokens=30, temperature=0, logits_processors=[take_time])
            others = [
                llm.submit(random_ids(6, seed=9), slow) for _ in range(2)
            ]  # which still run when scores are asked
            for _ in range(2):
                scores = llm.score(prompts, continuations)
                for prompt, its_continuations, row in zip(prompts, continuations, scores, strict=True):
                    for continuation, score in zip(its_continuations, row, strict=True):
                        check(score, model, prompt, continuation)
            for other in others:
                other.result(timeout=20)
            stats = llm.stats()
        assert is_idle(stats), name
        assert (stats.num_preemptions > 0) == (name == "preempted"), name


def test_what_greedy_decoding_generates_is_greedy_and_nothing_else_is() -> None:
    model = make_model("llama")
    prompt = random_ids(9, seed=1)
    with make_llm(model) as llm:
        generated = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=6, logprobs=0))[0].outputs[0]
        other = [*generated.token_ids[:-1], (generated.token_ids[-1] + 1) % VOCAB_SIZE]
        greedy, not_greedy = llm.score(prompt, [generated.token_ids, other])[0]
    assert (greedy.is_greedy, not_greedy.is_greedy) == (True, False)
    assert greedy.logprob == pytest.approx(generated.cumulative_logprob, abs=1e-4)


def test_a_prompt_is_computed_once_for_all_its_continuations() -> None:
    prompt = list(range(1, 41))
    with make_fake_llm(block_size=4, max_num_batched_tokens=128) as llm:
        scores = llm.score(prompt, [[100], [200, 201], [300, 301, 302]])[0]
        stats = llm.stats()
    # The block with the prompt's last token is each continuation's own, since its logits are needed.
    assert [score.num_cached_tokens for score in scores] == [0, 36, 36]
    assert (stats.num_computed_tokens, stats.num_steps) == (41 + 6 + 7, 1)


def test_only_the_logits_of_the_continuation_are_computed() -> None:
    seen: list[int] = []
    engine = make_engine(max_num_batched_tokens=7)
    engine.runner.on_step = lambda output: seen.extend(item.num_logits for item in output.scheduled)
    request = make_request(range(20), max_tokens=0, prompt_logprobs=0, prompt_logprobs_start=16)
    result = engine.run(request)[0]
    assert seen == [0, 0, 5]
    scored = [{i: (*logprob_of(range(i), i), None)} for i in range(16, 20)]
    assert result.prompt_logprobs == [None] * 16 + scored


# --- where a continuation begins ---


def merging_tokenizer(*merges: tuple[str, str], bos: bool = False, end: bool = False, ends: bool = False) -> Tokenizer:
    """Characters and what they merge to, a leading blank written as `▁`; with `ends`, `</s>` is put after a text."""
    tokens = [*"▁abcdef", *("".join(pair) for pair in merges)]
    backend = BackendTokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Metaspace(prepend_scheme="never")
    special = {}
    if bos:
        backend.add_special_tokens([AddedToken("<s>", special=True)])
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
        special["bos_token"] = "<s>"
    if ends:
        backend.add_special_tokens([AddedToken("</s>", special=True)])
        backend.post_processor = processors.TemplateProcessing(
            single="$A </s>", special_tokens=[("</s>", backend.token_to_id("</s>"))]
        )
    if end or ends:
        special["eos_token"] = "</s>"
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, **special))


@pytest.fixture
def words() -> Callable[[str, str], tuple[list[str], list[str]]]:
    """The tokens of both parts, spelled, where `▁a`, `bc` and `ef` are single tokens."""
    tokenizer = merging_tokenizer(("▁", "a"), ("b", "c"), ("e", "f"))

    def split(prompt: str, continuation: str) -> tuple[list[str], list[str]]:
        pair = pair_of(prompt, continuation, lambda: tokenizer)
        spelled = tokenizer.hf_tokenizer.convert_ids_to_tokens
        return spelled(pair.prompt), spelled(pair.continuation)

    return split


def test_both_are_tokenised_together(words: Any) -> None:
    assert words("ab", " ad") == (["a", "b"], ["▁a", "d"])


def test_spaces_at_the_prompts_end_belong_to_the_continuation(words: Any) -> None:
    assert words("ab ", "ad") == words("ab", " ad")


def test_the_continuation_is_what_goes_beyond_the_prompts_own_tokens(words: Any) -> None:
    """`bc` would be one token; the prompt keeps its `b`, and so a token less is scored, as in lm-eval."""
    assert words("ab", "cd") == (["a", "b"], ["d"])


def test_a_continuation_that_merges_into_the_prompt_is_tokenised_on_its_own(words: Any) -> None:
    assert words("de", "f") == (["d", "e"], ["f"])


def test_an_empty_prompt_is_bos_or_else_eos() -> None:
    with_bos, with_end, bare = merging_tokenizer(bos=True), merging_tokenizer(end=True), merging_tokenizer()
    for prompt in ("", " ", []):
        (bos,) = pair_of(prompt, "ab", lambda: with_bos).prompt
        (end,) = pair_of(prompt, "ab", lambda: with_end).prompt
        assert (bos, end) == (with_bos.hf_tokenizer.bos_token_id, with_end.hf_tokenizer.eos_token_id)
        with pytest.raises(InvalidRequestError, match="neither a BOS nor an EOS"):
            pair_of(prompt, "ab", lambda: bare)


def test_what_a_tokenizer_puts_after_a_text_is_no_part_of_the_pair() -> None:
    tokenizer = merging_tokenizer(ends=True)
    a, b, c, d, end = tokenizer.hf_tokenizer.convert_tokens_to_ids(["a", "b", "c", "d", "</s>"])
    assert tokenizer.encode("ab") == [a, b, end]
    assert pair_of("ab", "cd", lambda: tokenizer) == Pair([a, b], [c, d])
    assert pair_of("ab", [c], lambda: tokenizer) == Pair([a, b], [c])
    assert pair_of("", "cd", lambda: tokenizer) == Pair([end], [c, d])


def test_ids_are_taken_as_they_are() -> None:
    tokenizer = merging_tokenizer(("b", "c"), bos=True)
    ids = tokenizer.hf_tokenizer.convert_tokens_to_ids
    a, b, c, bos = ids(["a", "b", "c", "<s>"])
    assert pair_of([a, b], "c", lambda: tokenizer) == Pair([a, b], [c])
    assert pair_of("ab", [c], lambda: tokenizer) == Pair([bos, a, b], [c])


# --- shapes and refusals ---


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with make_llm(make_model("llama"), max_model_len=32, num_gpu_blocks_override=30) as llm:
        yield llm


@pytest.mark.parametrize(
    ("prompts", "continuations", "nums"),
    [
        ("ab", "c", [1]),
        ("ab", ["c", "de"], [2]),
        ("ab", [1, 2], [1]),
        ("ab", [[1, 2], "c"], [2]),
        ([1, 2], [3], [1]),
        ({"prompt": "ab", "cache_salt": "x"}, "c", [1]),
        (["ab", [1, 2]], ["c", [[3], [4]]], [1, 2]),
        ([], [], []),
    ],
)
def test_each_prompt_gets_a_list_with_a_score_per_continuation(
    llm: LLM, prompts: Any, continuations: Any, nums: list[int]
) -> None:
    scores = llm.score(prompts, continuations)
    again = asyncio.run(llm.ascore(prompts, continuations, priority=1))
    assert [len(row) for row in scores] == nums
    for one, other in zip(chain(*scores), chain(*again), strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.parametrize(
    ("prompts", "continuations", "message"),
    [
        ("ab", "", "the continuation '' is empty"),
        ("ab", [], "must be text or token ids"),
        ("ab", None, "must be text or token ids"),
        (["ab"], "c", "must be a list with one entry per prompt"),
        (["ab", "cd"], ["e"], "1 entries of continuations for 2 prompts"),
        ("ab", [VOCAB_SIZE], f"token id {VOCAB_SIZE}"),
        ("ab" * 20, "c", "max_model_len=32"),
        (3, "c", "must be text or a list of token ids"),
    ],
)
def test_what_cannot_be_scored_is_refused(llm: LLM, prompts: Any, continuations: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.score(prompts, continuations)


def test_sampling_parameters_are_no_options_of_score(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="max_tokens is a sampling parameter"):
        llm.score("ab", "c", max_tokens=3)


def test_a_whole_text_is_scored_after_an_empty_prompt() -> None:
    model = make_model("llama")
    with make_llm(model) as llm:
        (score,) = llm.score("", "A text.")[0]
    check(score, model, [BOS], list(b"A text."))
