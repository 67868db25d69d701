"""Keys and values as int8: half the memory, the same tokens whatever the engine does, nearly the model's own logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig

from helpers_models import VOCAB_SIZE, crowded, make_model, prompt_logprobs
from paged_backend import LLM, BeamSearchParams, ConfigError, EngineConfig, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
CROWDED: dict[str, dict[str, Any]] = {
    "chunked": {"max_num_batched_tokens": 5},
    "no prefix cache": {"enable_prefix_caching": False},
    "blocks that no four tokens fill": {"block_size": 3, "num_gpu_blocks_override": 40},
}


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def make_llm(architecture: str = "llama", kv_cache_dtype: str = "int8", **options: Any) -> LLM:
    settings = {"block_size": 4, "kv_cache_memory": "16MiB", "kv_cache_dtype": kv_cache_dtype}
    return LLM(make_model(architecture), **settings | options)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt_oss"])
def test_tokens_are_the_same_whatever_the_engine_does_to_get_there(architecture: str) -> None:
    (head,) = prompts(21, seed=1)
    work = [*prompts(5, 17, 1, 30), [*head, 1], [*head, 2, 3]]
    with make_llm(architecture) as llm:
        expected = [llm.generate([prompt], GREEDY)[0].outputs[0].token_ids for prompt in work]
        together = llm.generate(work, GREEDY.replace(n=2))
        assert [[sample.token_ids for sample in output.outputs] for output in together] == [[x, x] for x in expected]
        assert together[5].num_cached_tokens >= 20
    for name, options in (CROWDED | {"preempted": crowded(architecture, 15, 42)}).items():
        with make_llm(architecture, **options) as llm:
            assert [output.outputs[0].token_ids for output in llm.generate(work, GREEDY)] == expected, name
            stats = llm.stats()
        assert (stats.num_preemptions > 0) >= (name == "preempted")


def test_beams_are_the_same_in_a_crowded_cache() -> None:
    work, params = prompts(9, 14), BeamSearchParams(beam_width=3, max_tokens=8)
    found = []
    for options in ({}, {"num_gpu_blocks_override": 12}):
        with make_llm(**options) as llm:
            found.append([[beam.token_ids for beam in result.outputs] for result in llm.beam_search(work, params)])
    assert found[0] == found[1]


def test_log_probabilities_are_nearly_those_of_the_models_own_dtype() -> None:
    (prompt,) = prompts(120)
    read = []
    for kv_cache_dtype in ("auto", "int8"):
        with make_llm(kv_cache_dtype=kv_cache_dtype) as llm:
            read.append(prompt_logprobs(llm, prompt))
    difference = (read[0] - read[1]).abs()
    assert 0 < difference.mean() < 0.05 * read[0].std()


def test_nearly_twice_as_many_tokens_fit_as_in_16_bits() -> None:
    num_blocks = []
    for kv_cache_dtype in ("auto", "int8"):
        model = make_model(head_dim=64).bfloat16()
        with LLM(model, kv_cache_memory="1MiB", kv_cache_dtype=kv_cache_dtype) as llm:
            num_blocks.append(llm.stats().num_blocks)
    assert num_blocks[1] / num_blocks[0] > 1.9


def test_what_it_cannot_be_is_said() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype='fp4'.*int8.*fp8"):
        EngineConfig(kv_cache_dtype="fp4")
    with pytest.raises(ConfigError, match="float8_e4m3fn keys and values: 'cpu' lacks: float8 caches; use 'int8'"):
        make_llm(kv_cache_dtype="fp8", device="cpu")
    with pytest.raises(ConfigError, match=r"kv_cache_dtype='int8' is not available.*attention is code of its own"):
        LLM(AutoModelForCausalLM.from_config(BloomConfig(vocab_size=64, hidden_size=32)).eval(), kv_cache_dtype="int8")


def test_where_8_bits_change_too_much_it_is_said_by_how_much_and_what_to_do() -> None:
    model = make_model()
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.mul_(50)  # so that all attention goes to one of several nearly equal keys
    with LLM(model, kv_cache_memory="1MiB"):
        pass
    wanted = r"kv_cache_dtype='int8' .*is not available .*differs .* by 0\.\d+ .*at most 0\.3 .*leave it at 'auto'"
    for options in ({}, {"attention_backend": "torch"}):
        with pytest.raises(ConfigError, match=wanted) as refused:
            LLM(model, kv_cache_memory="1MiB", kv_cache_dtype="int8", **options)
        assert "own" not in str(refused.value)


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e5m2"])
def test_floats_of_8_bits_work_where_kernels_take_them(kv_cache_dtype: str) -> None:
    (head,) = prompts(21, seed=1)
    work = [*prompts(5, 17), [*head, 1], [*head, 2, 3]]
    options = {"attention_backend": "torch", "kv_cache_dtype": kv_cache_dtype}
    with make_llm(**options) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(work, GREEDY)]
    with make_llm(num_gpu_blocks_override=15, swap_space=0.01, **options) as llm:
        assert [output.outputs[0].token_ids for output in llm.generate(work, GREEDY.replace(n=1))] == expected
        assert llm.stats().num_swaps > 0
