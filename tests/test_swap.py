"""What a preempted sequence had computed waits in host memory, and nobody sees that it was there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from helpers import StepFailure, is_idle, make_engine, make_manager, make_request
from helpers_models import make_model
from paged_backend import LLM, ConfigError, EngineConfig, SamplingParams
from paged_backend.engine import request as engine_request
from paged_backend.engine.kv_cache_manager import KVCacheManager
from paged_backend.engine.kv_layout import Reach
from paged_backend.engine.request import Request
from paged_backend.model.kv_cache import LayerCache
from paged_backend.model.swap import HostBlocks


def crowd(**options: Any) -> list[Request]:
    prompts = [range(10 * index, 10 * index + 8) for index in range(4)]
    return [make_request(prompt, **{"max_tokens": 24} | options) for prompt in prompts]


def computed(manager: KVCacheManager, prompt: list[int]) -> engine_request.Sequence:
    """A sequence whose prompt is computed, in a step of its own."""
    sequence = make_request(prompt).sequences[0]
    manager.begin_step()
    assert manager.admit(sequence)
    manager.publish(sequence, sequence.num_tokens)
    sequence.num_computed_tokens = sequence.num_tokens
    manager.end_step()
    return sequence


def test_what_was_swapped_is_not_computed_again() -> None:
    roomy = make_engine(num_blocks=100)
    crowded = make_engine(num_blocks=11, num_swap_blocks=100, enable_prefix_caching=False)

    assert crowded.run(*crowd()) == roomy.run(*crowd())
    stats = crowded.engine.stats()
    assert stats.num_swaps == stats.num_preemptions > 1
    assert crowded.runner.num_tokens == roomy.runner.num_tokens
    assert is_idle(stats)


def test_what_does_not_fit_into_host_memory_is_computed_again() -> None:
    roomy, crowded = make_engine(num_blocks=100), make_engine(num_blocks=11, num_swap_blocks=5)

    assert crowded.run(*crowd()) == roomy.run(*crowd())
    stats = crowded.engine.stats()
    assert 0 < stats.num_swaps < stats.num_preemptions
    assert is_idle(stats)


def test_samples_that_come_back_share_their_prompt_again() -> None:
    def requests() -> list[Request]:
        return [make_request(range(12), n=4, max_tokens=20), *crowd(max_tokens=12)]

    roomy, crowded = make_engine(num_blocks=200), make_engine(num_blocks=12, num_swap_blocks=200)
    most_used, on_step = 0, crowded.runner.on_step

    def note(output: Any) -> None:
        nonlocal most_used
        most_used = max(most_used, crowded.engine.stats().num_blocks - crowded.engine.stats().num_free_blocks)
        on_step(output)

    crowded.runner.on_step = note

    assert crowded.run(*requests()) == roomy.run(*requests())
    assert crowded.engine.stats().num_swaps > 1
    assert most_used <= 12
    assert is_idle(crowded.engine.stats())


def test_only_what_the_prefix_cache_has_lost_comes_back_from_host_memory() -> None:
    manager = make_manager(num_blocks=4, block_size=4, num_swap_blocks=10)
    sequence = computed(manager, list(range(15)))
    swaps = manager.begin_step()
    manager.preempt(sequence)
    assert len(swaps.outs) == 4
    other = computed(manager, [50] * 6)  # takes the unpublished block, and the last one that was published
    manager.free(other)

    swaps = manager.begin_step()
    assert manager.admit(sequence)

    assert len(swaps.ins) == 2
    assert sequence.num_computed_tokens == 15
    manager.end_step()
    assert manager.swap_pool.num_used == 0


def test_host_memory_is_held_until_the_step_that_reads_it_is_computed() -> None:
    manager = make_manager(num_blocks=4, block_size=4, num_swap_blocks=10, enable_prefix_caching=False)
    sequence = computed(manager, list(range(15)))
    manager.begin_step()
    manager.preempt(sequence)
    manager.begin_step()
    assert manager.admit(sequence)
    assert manager.swap_pool.num_used == 4

    manager.withdraw(sequence)  # the step failed

    swaps = manager.begin_step()
    assert manager.admit(sequence)
    assert len(swaps.ins) == 4
    manager.end_step()
    assert manager.swap_pool.num_used == 0


def test_a_sequence_that_ends_while_it_waits_gives_host_memory_back() -> None:
    engine = make_engine(num_blocks=11, num_swap_blocks=100)
    requests = crowd()
    engine.add(*requests)
    while not engine.engine.stats().num_swaps:
        engine.step()
    assert engine.engine.stats().num_free_swap_blocks < 100
    for request in requests:
        engine.abort(request.request_id)

    assert is_idle(engine.engine.stats())


def test_a_failed_step_may_have_lost_what_it_was_to_swap() -> None:
    engine = make_engine(num_blocks=11, num_swap_blocks=100)
    requests = crowd()
    engine.add(*requests)
    while not engine.engine.stats().num_swaps:
        engine.failing_step() if _is_about_to_swap(engine) else engine.step()
    results = engine.run()

    assert results == []
    outcomes = [engine.result(request.request_id) for request in requests]
    survivors = [outcome for outcome in outcomes if outcome.error is None]
    assert all(isinstance(one.error.__cause__, StepFailure) for one in outcomes if one.error is not None)
    assert survivors and all(len(one.token_ids) == 24 for one in survivors)
    assert is_idle(engine.engine.stats())


def _is_about_to_swap(engine: Any) -> bool:
    manager = engine.scheduler.kv_cache_manager
    needed = sum(one.num_tokens % manager.block_size == 1 for one in engine.scheduler.running)
    return bool(manager.pool.num_free < needed)


def test_changed_weights_make_what_was_swapped_worthless() -> None:
    engine = make_engine(num_blocks=11, num_swap_blocks=100)
    engine.add(*crowd())
    while engine.engine.stats().num_free_swap_blocks == 100:
        engine.step()

    engine.engine.reset_prefix_cache()

    assert engine.engine.stats().num_free_swap_blocks == 100


def test_blocks_behind_the_window_are_neither_swapped_nor_brought_back() -> None:
    manager = KVCacheManager(5, 4, reaches=[Reach(window=6)], num_swap_blocks=5)
    sequence = computed(manager, list(range(17)))
    assert manager.allocate_slots(sequence, 1) == []  # three blocks are behind the window of the next token
    swaps = manager.begin_step()
    manager.preempt(sequence)
    assert len(swaps.outs) == 2
    manager.free(computed(manager, [90 + i for i in range(20)]))  # and the prefix cache forgets the others

    swaps = manager.begin_step()
    assert manager.admit(sequence)

    assert (len(swaps.ins), sequence.num_computed_tokens, manager.pool.num_used) == (2, 17, 2)
    manager.end_step()
    manager.free(sequence)
    assert (manager.pool.num_used, manager.swap_pool.num_used) == (0, 0)


@pytest.mark.parametrize(
    "options, kv_cache_dtype, num_crowded",
    [({}, "auto", 30), ({}, "int8", 30), ({"architecture": "mistral", "sliding_window": 32}, "auto", 17)],
)
def test_real_models_write_the_same_with_it(options: dict[str, Any], kv_cache_dtype: str, num_crowded: int) -> None:
    prompts = [[7 * index + i for i in range(20)] for index in range(6)]
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=3, ignore_eos=True)
    texts = []
    for num_blocks, swap_space in ((200, 0), (num_crowded, 0.01)):
        llm = LLM(
            make_model(**options),
            block_size=4,
            num_gpu_blocks_override=num_blocks,
            swap_space=swap_space,
            kv_cache_dtype=kv_cache_dtype,
            enable_prefix_caching=False,
        )
        with llm:
            texts.append([output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
            stats = llm.stats()
    assert texts[0] == texts[1]
    assert stats.num_swaps == stats.num_preemptions > 0
    assert stats.num_computed_tokens == 6 * (20 + 40 - 1)
    assert is_idle(stats)


class OnGPU(torch.Tensor):
    """Says that it is on a GPU."""

    device = torch.device("cuda")


class FakeStream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def wait_stream(self, other: FakeStream) -> None:
        self._log.append(f"{self.name} waits for {other.name}")


def test_on_a_gpu_pinned_memory_is_copied_beside_what_runs_there_and_in_its_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []
    zeros, current = torch.zeros, FakeStream("the current stream", log)

    def empty(*shape: int, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        log.append(f"pinned: {pin_memory}")
        return zeros(*shape, dtype=dtype)

    @contextlib.contextmanager
    def use(stream: FakeStream) -> Iterator[None]:
        log.append(f"on {stream.name}")
        yield
        log.append(f"off {stream.name}")

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream("the other", log))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "stream", use)
    keys = torch.arange(4.0).view(4, 1, 1, 1).as_subclass(OnGPU)
    blocks = HostBlocks([LayerCache(keys, None, None, None)], swap_space=1e-7)

    blocks.copy_out([(1, 0), (2, 1)])
    keys.zero_()
    blocks.copy_in([(1, 3), (0, 0)])

    assert keys.flatten().tolist() == [1.0, 0.0, 0.0, 2.0]
    once = ["the other waits for the current stream", "on the other", "off the other"]
    assert log == ["pinned: True", *(2 * [*once, "the current stream waits for the other"])]


@pytest.mark.parametrize("swap_space, message", [(1e-7, "holds no block.*raise it"), (1e6, "GiB of host memory")])
def test_room_that_cannot_be_had_is_refused(swap_space: float, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"swap_space={swap_space!r}.*{message}"):
        LLM(make_model(), kv_cache_memory="1MiB", swap_space=swap_space)
    with pytest.raises(ConfigError, match="swap_space=-1"):
        EngineConfig(swap_space=-1)
