"""A step that the device has no memory for is tried again with fewer tokens; whoever was in it notices nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import EngineUnderTest, is_idle, make_engine, make_request
from helpers_models import make_model
from paged_backend import LLM, EngineError, SamplingParams
from paged_backend.engine.request import Request
from paged_backend.engine.scheduler import OutOfDeviceMemoryError, SchedulerOutput
from paged_backend.engine.step_budget import StepBudget


def with_memory_for(num_tokens: int, **options: Any) -> EngineUnderTest:
    """An engine whose device never has memory for a step of more tokens; its steps are in `sizes`."""
    engine = make_engine(**options)
    sizes = engine.sizes = []  # type: ignore[attr-defined]

    def run_out(output: SchedulerOutput) -> None:
        sizes.append(output.num_tokens)
        if output.num_tokens > num_tokens:
            raise OutOfDeviceMemoryError("on purpose")

    engine.runner.on_step = run_out
    return engine


def requests() -> list[Request]:
    shared = list(range(40))
    return [make_request([*shared, index], n=1 + index % 2, logprobs=1, prompt_logprobs=0) for index in range(5)]


@pytest.mark.parametrize("num_tokens", [1, 3, 20, 63])
@pytest.mark.parametrize("num_blocks, num_swap_blocks", [(200, 0), (22, 0), (22, 100)])
def test_requests_are_intact(num_tokens: int, num_blocks: int, num_swap_blocks: int) -> None:
    engine = with_memory_for(num_tokens, num_blocks=num_blocks, num_swap_blocks=num_swap_blocks)

    assert engine.run(*requests()) == make_engine(num_blocks=200).run(*requests())
    assert is_idle(engine.engine.stats())


def test_each_try_has_half_the_tokens() -> None:
    engine = with_memory_for(20, max_num_batched_tokens=64)
    engine.run(make_request(range(64), max_tokens=1))

    assert engine.sizes == [64, 32, 16, 16, 16, 16]  # type: ignore[attr-defined]


def test_what_a_step_was_to_publish_is_found_once_it_is_computed() -> None:
    engine = with_memory_for(20, max_num_batched_tokens=64)
    engine.run(make_request(range(64), max_tokens=1))
    engine.run(make_request([*range(64), 9], max_tokens=1))

    assert engine.engine.stats().num_prefix_hit_tokens == 64


def test_the_smallest_step_fails_its_request_and_says_what_to_do() -> None:
    engine = with_memory_for(0)
    results = engine.run(*(make_request(range(9)) for _ in range(3)))

    for result in results:
        assert isinstance(result.error, EngineError)
        assert "1 token" in str(result.error) and "lower kv_cache_memory or gpu_memory_utilization" in str(result.error)
    assert is_idle(engine.engine.stats())
    engine.runner.on_step = lambda output: None
    assert engine.run(make_request(range(9)))[0].error is None


def test_larger_steps_are_tried_again_after_a_while() -> None:
    budget = StepBudget(100)
    budget.ran_out(80)
    assert budget.num_tokens == 40
    sizes = []
    for _ in range(200):
        budget.step_computed()
        sizes.append(budget.num_tokens)

    assert sizes[10] == 40 and sizes[100] == 80 and sizes[-1] == 100


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_real_models_write_the_same_after_it(architecture: str, error: Exception) -> None:
    prompts = [[7 * index + i for i in range(30)] for index in range(4)]
    params = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
    with LLM(make_model(architecture), kv_cache_memory="4MiB") as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    num_failed = 0

    def run_out(module: torch.nn.Module, arguments: tuple[Tensor, ...]) -> None:
        nonlocal num_failed
        if type(module).__name__.endswith("MLP") and arguments[0].shape[1] > 20:
            num_failed += 1
            raise error

    with LLM(make_model(architecture), kv_cache_memory="4MiB") as llm:
        hook = torch.nn.modules.module.register_module_forward_pre_hook(run_out)
        try:
            outputs = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        finally:
            hook.remove()
        assert is_idle(llm.stats())
    assert outputs == expected
    assert num_failed > 0
