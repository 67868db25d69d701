"""The KV cache gets what the largest step leaves; closing gives everything back."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import paged_kernels
from helpers_capture import FakeGraphs, graphs_on_cpu
from helpers_models import MAX_POSITIONS, VOCAB_SIZE, make_model, save_model
from paged_backend import LLM, ConfigError, EngineConfig, SamplingParams
from paged_backend.model import kv_cache, memory
from paged_backend.model.largest_step import largest_lengths

MIB = 2**20
BYTES_PER_BLOCK = 3 * 2 * 2 * 16 * 4 * 4  # layers, keys and values, heads, head size, tokens, float32
PROMPTS = [[7 * index + i for i in range(30)] for index in range(4)]
GREEDY = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)


class FakeMeter:
    """Of a device on which every step takes so many bytes; notes what was computed by the shapes of the products."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.rows: set[int] = set()
        self.num_logits: set[int] = set()

    def peak_of(self, compute: Callable[[], object]) -> int:
        def note(module: Any, arguments: tuple[Any, ...], result: Any) -> None:
            if isinstance(module, torch.nn.Embedding):
                self.rows.add(arguments[0].numel())
            if isinstance(result, torch.Tensor) and result.shape[-1] == VOCAB_SIZE:
                self.num_logits.add(result.numel() // VOCAB_SIZE)

        hook = torch.nn.modules.module.register_module_forward_hook(note)
        try:
            compute()
        finally:
            hook.remove()
        return self.num_bytes


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeMeter:
    """One with 90 MiB free, of which a CPU's cache may have a third of the share asked for."""
    meter = FakeMeter(9 * MIB)
    monkeypatch.setattr("paged_backend.model.runner.meter_of", lambda device: meter)
    monkeypatch.setattr(kv_cache, "available_memory", lambda device="auto": 90 * MIB)
    return meter


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "bloom"])
def test_the_cache_gets_the_share_of_what_is_free_less_what_the_largest_step_takes(
    architecture: str, device: FakeMeter
) -> None:
    options: dict[str, Any] = {"block_size": 4, "max_num_seqs": 50, "max_num_batched_tokens": 100}
    model = make_model(architecture) if architecture != "bloom" else _bloom()
    with LLM(model, gpu_memory_utilization=0.5, **options) as llm:
        with LLM(model, kv_cache_memory=(90 // 2 - 9) * MIB // 3, **options) as same:
            assert llm.stats().num_blocks == same.stats().num_blocks
            expected = [output.outputs[0].token_ids for output in same.generate(PROMPTS, GREEDY, use_tqdm=False)]
        assert [one.outputs[0].token_ids for one in llm.generate(PROMPTS, GREEDY, use_tqdm=False)] == expected
    if architecture == "bloom":  # which runs in calls: of one long chunk, and of all the chunks of one token
        assert (max(device.rows), max(device.num_logits)) == (51, 49)
    else:
        assert (device.rows, device.num_logits) == ({100}, {50})


def test_what_sampling_takes_is_measured_with_the_step(device: FakeMeter, monkeypatch: pytest.MonkeyPatch) -> None:
    nums_rows: list[int] = []

    def noted(kernel: Any) -> Any:
        def run(logits: torch.Tensor, *rest: Any) -> Any:
            nums_rows.append(len(logits))
            return kernel(logits, *rest)

        return run

    for name in ("draw", "best_logits"):
        monkeypatch.setattr(paged_kernels, name, noted(getattr(paged_kernels, name)))
    with LLM(make_model(), max_num_seqs=50, max_num_batched_tokens=100):
        assert nums_rows == [50, 50]


def test_graphs_get_room_beside_the_step(device: FakeMeter, tmp_path: Path) -> None:
    """What they take is theirs for as long as they may be replayed."""
    folder, nums_blocks = save_model(tmp_path), []
    for is_eager in (True, False):
        with (
            graphs_on_cpu(FakeGraphs()),
            LLM(folder, attention_backend="torch", block_size=4, enforce_eager=is_eager) as llm,
        ):
            nums_blocks.append(llm.stats().num_blocks)
    assert (nums_blocks[0] - nums_blocks[1]) * BYTES_PER_BLOCK == pytest.approx(9 * MIB // 3, abs=BYTES_PER_BLOCK)


def _bloom() -> Any:
    from transformers import BloomConfig, BloomForCausalLM

    config = BloomConfig(vocab_size=VOCAB_SIZE, hidden_size=64, n_layer=2, n_head=4, initializer_range=0.15)
    return BloomForCausalLM(config).eval().requires_grad_(False)


def test_a_cache_that_leaves_no_room_for_the_largest_step_is_refused(device: FakeMeter) -> None:
    with pytest.raises(ConfigError, match=r"0\.08 GiB.*0\.01 GiB that a step of 512 tokens takes.*max_num_batched_"):
        LLM(make_model(), kv_cache_memory=85 * MIB, max_num_seqs=10000)


def test_a_step_that_takes_everything_is_refused(device: FakeMeter) -> None:
    device.num_bytes = 89 * MIB
    with pytest.raises(ConfigError, match=r"holds 0 blocks.*beside the 0\.09 GiB that a step of 512 tokens takes"):
        LLM(make_model())


def test_nothing_is_measured_on_a_cpu() -> None:
    assert memory.meter_of(torch.device("cpu")) is None


@pytest.mark.parametrize(
    "num_tokens, num_seqs, max_len, expected",
    [
        (100, 4, 1000, [97, 1, 1, 1]),
        (100, 4, 60, [60, 38, 1, 1]),
        (3, 256, 1000, [1, 1, 1]),
        (100, 2, 20, [20, 20]),
        (8192, 1, MAX_POSITIONS, [MAX_POSITIONS]),
    ],
)
def test_the_largest_step_has_long_prompts_and_as_many_sequences_as_there_may_be(
    num_tokens: int, num_seqs: int, max_len: int, expected: list[int]
) -> None:
    config = EngineConfig(max_num_batched_tokens=num_tokens, max_num_seqs=num_seqs)
    assert largest_lengths(config, max_len) == expected


def test_closing_gives_everything_back() -> None:
    seen: list[weakref.ref[torch.Tensor]] = []
    allocate = kv_cache.allocate

    def note(*args: Any) -> list[kv_cache.LayerCache]:
        caches = allocate(*args)
        seen.extend(weakref.ref(tensor) for cache in caches for tensor in (cache.keys, cache.values))
        return caches

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache, "allocate", note)
        llm = LLM("demo", kv_cache_memory="4MiB", swap_space=0.01)
    llm.generate(["one"], GREEDY, use_tqdm=False)
    llm.close()
    gc.collect()
    assert seen and not any(ref() is not None for ref in seen)
