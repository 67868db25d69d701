"""Every attention backend gives what the definition gives, says what it lacks, and is chosen by that."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import helpers_attention_libraries
import paged_kernels
from helpers_models import make_model
from paged_backend import LLM, BeamSearchParams, ConfigError, EngineConfig, SamplingParams
from paged_backend.model.attention import LayerSpec, PagedLayers, StepMetadata
from paged_backend.model.attention_backends import (
    AttentionBackend,
    CpuAttention,
    FlashAttention,
    FlashInfer,
    Needs,
    TorchAttention,
    TritonAttention,
    attention_backend,
)
from paged_backend.model.kv_cache import LayerCache, allocate
from paged_backend.model.latents import LatentShape
from paged_backend.model.loader import load
from paged_backend.model.runner import ModelRunner
from paged_backend.model.ways import Tier
from paged_kernels import reference
from paged_kernels.transfers import on_device

needs_interpreter = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs interpreted Triton",
)
CUDA, CPU = torch.device("cuda"), torch.device("cpu")
HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 64, 256
BATCHES = {
    "decodes": [(1, 5), (1, 300), (1, 256)],
    "prompts": [(7, 7), (40, 290)],
    "both": [(1, 9), (1, 513), (20, 270), (1, 3)],
}
"""How many tokens each sequence computes, and how many it has then."""


def make_spec(**options: Any) -> LayerSpec:
    fields = {"num_kv_heads": KV_HEADS, "head_size": SIZE, "value_head_size": SIZE, "scale": 0.2}
    return LayerSpec(**{**fields, "window": None, "chunk": None, "softcap": None, **options})


def make_needs(*specs: LayerSpec, **options: Any) -> Needs:
    fields = {"device": CUDA, "dtype": torch.bfloat16, "cache_dtype": torch.bfloat16, "block_size": BLOCK}
    return Needs(**{**fields, "specs": specs or (make_spec(),), **options})


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    helpers_attention_libraries.install(monkeypatch)


class Batch:
    """Sequences with their earlier keys and values in pages, and what a layer gives for their new tokens."""

    def __init__(self, lengths: list[tuple[int, int]], spec: LayerSpec, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        num_new = [new for new, _ in lengths]
        blocks_of = [-(-total // BLOCK) for _, total in lengths]
        numbers = np.random.default_rng(seed).permutation(sum(blocks_of) + 2).astype(np.int32)
        tables = np.zeros((len(lengths), max(blocks_of)), np.int32)
        slots: list[int] = []
        for row, ((new, total), num_blocks) in enumerate(zip(lengths, blocks_of, strict=True)):
            tables[row, :num_blocks], numbers = numbers[:num_blocks], numbers[num_blocks:]
            positions = np.arange(total - new, total)
            slots += (tables[row, positions // BLOCK] * BLOCK + positions % BLOCK).tolist()
        starts = np.array([0, *np.cumsum(num_new)], np.int32)
        totals = np.array([total for _, total in lengths], np.int32)
        self.arrays = np.array([slots], np.int64), tables[None], starts, totals
        self.metadata = StepMetadata.of(*self.arrays, CPU)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        self.spec = spec
        (self._cache,) = allocate([spec], sum(blocks_of) + 2, BLOCK, torch.float32, CPU)
        for tensor in (self._cache.keys, self._cache.values):
            tensor.copy_(random(*tensor.shape))
        self._new = [random(sum(num_new), heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)]

    def cache(self) -> LayerCache:
        return self._cache._replace(keys=self._cache.keys.clone(), values=self._cache.values.clone())

    def attend(self, backend: AttentionBackend) -> torch.Tensor:
        return PagedLayers([self.spec], [self.cache()], self.metadata, backend).attend_packed(*self._new)

    def expected(self) -> torch.Tensor:
        query, key, value = self._new
        cache, (metadata,) = self.cache(), self.metadata.groups
        reference.store_kv(key, value, cache.keys, cache.values, metadata.slot_mapping)
        places = (metadata.block_tables, metadata.query_start_loc, metadata.seq_lens)
        return reference.paged_attention(query, cache.keys, cache.values, *places, **self.spec.kernel_options(None))


class BackendContract:
    """What is true of all of them."""

    backend: type[Any]
    layers: ClassVar[dict[str, dict[str, Any]]] = {"plain": {}, "window": {"window": 40}, "softcap": {"softcap": 8.0}}

    def make(self, spec: LayerSpec) -> AttentionBackend:
        backend: AttentionBackend = self.backend(make_needs(spec, device=CPU))
        return backend

    @pytest.mark.parametrize("batch", BATCHES)
    def test_it_gives_what_the_definition_gives(self, batch: str) -> None:
        for options in self.layers.values():
            spec = make_spec(**options)
            case = Batch(BATCHES[batch], spec)
            torch.testing.assert_close(case.attend(self.make(spec)), case.expected(), atol=2e-5, rtol=1e-4)

    def test_layers_of_one_model_may_differ(self) -> None:
        specs = [make_spec(**options) for options in (*self.layers.values(), *self.layers.values())]
        cases = [Batch(BATCHES["both"], spec) for spec in specs]
        layers = PagedLayers(specs, [one.cache() for one in cases], cases[0].metadata, self.make(specs[0]))
        for case in cases:
            torch.testing.assert_close(layers.attend_packed(*case._new), case.expected(), atol=2e-5, rtol=1e-4)

    def test_groups_of_layers_have_tables_of_their_own(self) -> None:
        specs = [make_spec(), make_spec(group=1)] * 2
        cases = [Batch(BATCHES["both"], spec, seed=spec.group) for spec in specs]
        slots, tables, starts, totals = zip(*(case.arrays for case in cases[:2]), strict=True)
        metadata = StepMetadata.of(np.concatenate(slots), np.concatenate(tables), starts[0], totals[0], CPU)
        layers = PagedLayers(specs, [one.cache() for one in cases], metadata, self.make(specs[0]))
        for case in cases:
            torch.testing.assert_close(layers.attend_packed(*case._new), case.expected(), atol=2e-5, rtol=1e-4)

    def test_it_is_found_by_its_name_and_lacks_nothing_for_a_plain_model(self) -> None:
        device = CPU if self.backend is CpuAttention else CUDA
        if self.backend is TritonAttention:  # which is interpreted here
            device = CPU
        needs = make_needs(device=device)
        assert self.backend.lacks(needs) == []
        if self.backend is FlashInfer:
            return  # its workspace is on the device
        assert type(attention_backend(self.backend.name, needs)) is self.backend


class TestCpu(BackendContract):
    backend = CpuAttention
    layers: ClassVar = {**BackendContract.layers, "chunk": {"chunk": 33}}


class TestTorch(BackendContract):
    backend = TorchAttention
    layers: ClassVar = TestCpu.layers


@needs_interpreter
class TestTriton(BackendContract):
    backend = TritonAttention
    layers: ClassVar = {"plain": {}, "window and softcap": {"window": 40, "softcap": 8.0}, "chunk": {"chunk": 33}}


class TestFlashAttention(BackendContract):
    backend = FlashAttention


class TestFlashInfer(BackendContract):
    backend = FlashInfer


def test_flashinfer_plans_once_per_step_for_all_layers_that_are_alike() -> None:
    specs = [make_spec(), make_spec(window=9)] * 3
    cases = [Batch(BATCHES["both"], spec) for spec in specs]
    made: list[Any] = []

    class Noted(helpers_attention_libraries.BatchPrefillWithPagedKVCacheWrapper):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        helpers_attention_libraries.install(patch)
        import flashinfer  # type: ignore[import-not-found]

        patch.setattr(flashinfer, "BatchPrefillWithPagedKVCacheWrapper", Noted)
        backend = FlashInfer(make_needs(*specs, device=CPU))
        for _ in range(2):
            layers = PagedLayers(specs, [one.cache() for one in cases], cases[0].metadata, backend)
            for case in cases:
                layers.attend_packed(*case._new)
    assert [wrapper.num_plans for wrapper in made] == [2, 2]


LATENT = {"num_kv_heads": 1, "head_size": 576, "value_head_size": 512, "latent": LatentShape(16, 512, 64, 128, 128)}


@pytest.mark.parametrize("name", ["flash_attn", "flashinfer"])
@pytest.mark.parametrize(
    "layer, options, what",
    [
        ({"chunk": 8}, {}, "chunked attention"),
        ({"has_sinks": True}, {}, "attention sinks"),
        (LATENT, {}, r"heads of \(576, 512\) numbers \(keys, values\), latents"),
        ({"head_size": 36, "value_head_size": 36}, {}, r"heads of \(36, 36\) numbers"),
        ({}, {"dtype": torch.float32, "cache_dtype": torch.float32}, "not in torch.float32"),
        ({}, {"cache_dtype": torch.int8}, "a KV cache of another type"),
        ({}, {"device": CPU}, "not on cpu"),
    ],
)
def test_a_forced_backend_that_does_not_suit_says_what_it_lacks_and_what_would(
    name: str, layer: dict[str, Any], options: dict[str, Any], what: str
) -> None:
    other = "'cpu'" if "device" in options else r"'\w+'"
    with pytest.raises(ConfigError, match=rf"attention_backend='{name}'.*{what}.*use attention_backend={other}"):
        attention_backend(name, make_needs(make_spec(**layer), **options))


def test_flash_attn_wants_large_blocks() -> None:
    with pytest.raises(ConfigError, match="it takes block_size=256, not 16"):
        attention_backend("flash_attn", make_needs(block_size=16))


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    absent = ("flash_attn", "flashinfer", "triton")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in absent else find(name, *rest))
    for name in ("flash_attn", "flashinfer", "triton"):
        with pytest.raises(ConfigError, match=rf"'{name}' lacks: .*not installed.*pip install"):
            attention_backend(name, make_needs())
    assert attention_backend("auto", make_needs()).name == "torch"


def test_the_devices_kernels_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = []
    for lacking in (
        (),
        (TritonAttention,),
        (TritonAttention, FlashInfer),
        (TritonAttention, FlashInfer, FlashAttention),
    ):
        with monkeypatch.context() as patch:
            for backend in (TritonAttention, FlashInfer, FlashAttention):
                patch.setattr(backend, "lacks", lambda needs, is_out=backend in lacking: ["x"] if is_out else [])
                patch.setattr(backend, "__init__", lambda self, needs: None)
            chosen.append(attention_backend("auto", make_needs()).name)
    assert chosen == ["triton", "flashinfer", "flash_attn", "torch"]
    assert attention_backend("auto", make_needs(device=CPU)).name == "cpu"
    assert attention_backend("auto", make_needs(device=torch.device("mps"))).name == "torch"


def test_the_engine_runs_on_the_one_that_is_asked_for() -> None:
    prompts = [[7 * index + i for i in range(20)] for index in range(3)]
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    found = []
    for name in ("auto", "torch"):
        for architecture in ("llama", "gpt_oss"):
            with LLM(make_model(architecture), attention_backend=name, kv_cache_memory="1MiB") as llm:
                found.append([one.outputs[0].token_ids for one in llm.generate(prompts, params, use_tqdm=False)])
    assert found[:2] == found[2:]


@needs_interpreter
def test_the_engine_runs_on_interpreted_triton() -> None:
    prompts, params = [[3, 4, 5], [9] * 7], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    found = []
    for name in ("auto", "triton"):
        model = make_model(num_hidden_layers=1)
        with LLM(model, attention_backend=name, kv_cache_memory="1MiB", max_num_batched_tokens=5) as llm:
            found.append([one.outputs[0].token_ids for one in llm.generate(prompts, params, use_tqdm=False)])
    assert found[0] == found[1]


class OnMPS(torch.Tensor):
    """Says that it is on an Apple GPU."""

    device = torch.device("mps")

    def cpu(self) -> torch.Tensor:  # type: ignore[override]
        return self.as_subclass(torch.Tensor)


def test_logits_of_a_device_without_float64_are_sampled_on_the_cpu() -> None:
    config = EngineConfig(kv_cache_memory="4MiB")
    runner, logits = ModelRunner(load(make_model(), None, config), config), torch.rand(3, 5)
    for rows in ([0, 1, 2], [2, 0]):
        taken = runner.rows(logits.as_subclass(OnMPS), rows)
        assert type(taken) is torch.Tensor and torch.equal(taken, logits[rows])


def test_whatever_is_launched_is_launched_on_the_device_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton asks for the thread's current device, which need not be the model's."""
    current: list[torch.device] = []
    launched: dict[str, set[bool]] = {}

    @contextlib.contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    def noted(name: str, kernel: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            launched.setdefault(name, set()).add(bool(current) and current[-1] == CPU)
            return kernel(*args, **kwargs)

        return run

    for module in ("paged_backend.model.runner", "paged_backend.sampling.sampler"):
        monkeypatch.setattr(f"{module}.on_device", on)
    names = {"store_kv", "paged_attention", "draw", "best_logits", "penalise"}
    for name in names:
        monkeypatch.setattr(paged_kernels, name, noted(name, getattr(paged_kernels, name)))
    params = SamplingParams(max_tokens=3, logprobs=1, prompt_logprobs=1, repetition_penalty=1.2, ignore_eos=True)
    with LLM(make_model(), kv_cache_memory="1MiB") as llm:
        llm.generate([[3, 4, 5]], params, use_tqdm=False)
        llm.beam_search([[3, 4, 5]], BeamSearchParams(beam_width=2, max_tokens=3))
    assert launched == {name: {True} for name in names} and not current
    second: Any = on_device(torch.device("cuda:1"))
    assert isinstance(second, torch.cuda.device) and second.idx == 1


def test_names_that_there_are_not_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"attention_backend='xformers'.*'triton'"):
        EngineConfig(attention_backend="xformers")
    with pytest.raises(ConfigError, match=r"attention_backend='flash_attn'.*not on cpu"):
        LLM(make_model(), attention_backend="flash_attn")


def test_a_kernel_that_fails_is_named_before_a_slower_way_is_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("ptxas failed")

    monkeypatch.setattr("paged_kernels.cpu.paged_attention", fail)
    runner = ModelRunner(load(make_model(), None, EngineConfig()), EngineConfig(kv_cache_memory="4MiB"))
    assert runner.verdict.way.tier is not Tier.PACKED
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert any("cannot run" in warning and "ptxas failed" in warning for warning in warnings)


def test_what_a_library_copies_from_its_own_memory_keeps_steps_from_overlapping(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not FlashInfer.lets_steps_queue
    monkeypatch.setattr(CpuAttention, "lets_steps_queue", False)
    config = EngineConfig(kv_cache_memory="4MiB")
    assert not ModelRunner(load(make_model(), None, config), config).takes_pending_tokens
    monkeypatch.setattr(CpuAttention, "lets_steps_queue", True)
    assert ModelRunner(load(make_model(), None, config), config).takes_pending_tokens
