"""Decode steps are padded so that a CUDA graph may replay them: the same tokens, nothing written by padding, and no
operation that depends on the requests. There is no graph on a CPU: what would be captured is run again instead."""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import paged_kernels
from helpers_capture import FakeGraphs, StepTrace, broken_rules, graphs_on_cpu
from helpers_lora import TARGETS, save_adapter
from helpers_models import make_model, save_model
from paged_backend import LLM, EngineConfig, LoRARequest, SamplingParams
from paged_backend.model import decoder as decoder_module
from paged_backend.model import lora as lora_module
from paged_backend.model.attention import LayerSpec, PagedLayers
from paged_backend.model.attention_backends import TorchAttention, TritonAttention
from paged_backend.model.decoder import FusedDecoder
from paged_backend.model.graphs import DecodeGraphs, DecodeInputs, graph_sizes
from paged_backend.model.inputs import StepInputs
from paged_backend.model.kv_cache import allocate
from paged_backend.model.lora import AdapterSlots, AdapterStore, adapted
from paged_kernels import add_low_rank

VOCAB, BLOCK, MAX_BLOCKS = 50, 4, 9
NUM_GROUPS, NUM_BLOCKS = 2, MAX_BLOCKS * 16
FRESH = [torch.ones(VOCAB) for _ in range(3)]
"""A tensor for each time that a step is run."""
PARAMS = SamplingParams(max_tokens=10, temperature=0.8, seed=1, ignore_eos=True, logprobs=2)
PROMPTS = [[7 * index + i for i in range(3 + 4 * index)] for index in range(4)]


def make_inputs(*lengths: int, seed: int = 0) -> StepInputs:
    """Sequences of so many tokens, each of which computes its newest one, with a table in either group of layers."""
    generator = np.random.default_rng(seed)
    widths = [-(-length // BLOCK) for length in lengths]
    tables = np.zeros((NUM_GROUPS, len(lengths), max(widths)), np.int32)
    blocks = generator.permutation(NUM_BLOCKS)
    for group in tables:
        for row, width in zip(group, widths, strict=True):
            row[:width], blocks = blocks[:width], blocks[width:]
    last = np.array(lengths) - 1
    slots = tables[:, np.arange(len(lengths)), last // BLOCK].astype(np.int64) * BLOCK + last % BLOCK
    ids = generator.integers(0, VOCAB, len(lengths))
    rows = np.arange(len(lengths))
    starts = np.arange(len(lengths) + 1, dtype=np.int32)
    return StepInputs(ids, last, rows, slots, tables, starts, np.array(lengths, np.int32))


def make_graphs(
    compute: Callable[[DecodeInputs], Tensor], fake: FakeGraphs | None = None, *, max_num_seqs: int = 8
) -> DecodeGraphs:
    return DecodeGraphs(
        lambda inputs, variant: compute(inputs),
        (fake or FakeGraphs()).capture,
        max_num_seqs=max_num_seqs,
        max_num_blocks=MAX_BLOCKS,
        num_groups=NUM_GROUPS,
        vocab_size=VOCAB,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


class Model:
    """A decoder with a paged cache, of which every step says which memory its inputs were in."""

    def __init__(self) -> None:
        self.decoder = FusedDecoder(make_model(vocab_size=VOCAB, pad_token_id=None, eos_token_id=None))
        spec = LayerSpec(2, 16, 16, 0.25, None, None, None)
        self.specs = [spec, spec._replace(window=6, group=1), spec]
        self.cache = allocate(self.specs, NUM_BLOCKS, BLOCK, torch.float32, torch.device("cpu"))
        for layer in self.cache:
            layer.keys.normal_()
            layer.values.normal_()
        self.attention: Any = TorchAttention(None)  # type: ignore[arg-type]

    def compute(self, inputs: DecodeInputs) -> Tensor:
        layers = PagedLayers(self.specs, self.cache, inputs.metadata(BLOCK), self.attention)
        return self.decoder.logits(self.decoder(layers, inputs.input_ids, inputs.positions, inputs.rows))

    def written(self, step: Callable[[], object]) -> set[int]:
        """The slots whose keys a step changes."""
        before = [layer.keys.clone() for layer in self.cache]
        step()
        changed = torch.stack([(old != new.keys).any(3).any(1) for old, new in zip(before, self.cache, strict=True)])
        return set(changed.any(0).flatten().nonzero().flatten().tolist())


@pytest.mark.parametrize("most", [1, 2, 3, 8, 40, 256, 300])
def test_a_step_is_never_padded_by_much(most: int) -> None:
    sizes = graph_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == most
    for wanted in range(1, most + 1):
        padded = next(size for size in sizes if size >= wanted)
        assert padded <= max(1.15 * wanted + 1, wanted + 7)


STEPS = [(5, 9, 1), (30, 2, 7), (12, 3, 36), (1, 1), (8,), (9, 30, 2, 4, 5)]
needs_interpreter = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs interpreted Triton",
)


@pytest.mark.parametrize(
    "attention, steps", [(TorchAttention, STEPS), pytest.param(TritonAttention, STEPS[:2], marks=needs_interpreter)]
)
@torch.inference_mode()
def test_padded_steps_give_the_logits_of_each_sequence_alone_and_write_one_slot_each(
    attention: Any, steps: list[tuple[int, ...]]
) -> None:
    model = Model()
    model.attention = attention(None)
    fake = FakeGraphs()
    graphs = make_graphs(model.compute, fake)
    for seed, lengths in enumerate(steps):
        inputs = make_inputs(*lengths, seed=seed)
        step = functools.partial(graphs, inputs)
        assert model.written(step) == set(inputs.slot_mapping.flatten().tolist())
        logits = step().clone()
        for row in range(len(lengths)):
            only = slice(row, row + 1)
            alone = inputs._replace(
                **{name: getattr(inputs, name)[only] for name in ("input_ids", "positions", "keep", "seq_lens")},
                slot_mapping=inputs.slot_mapping[:, only],
                block_tables=inputs.block_tables[:, only],
                query_start_loc=inputs.query_start_loc[:2],
            )
            torch.testing.assert_close(graphs(alone)[0], logits[row], atol=1e-5, rtol=1e-4)
    assert sum(fake.num_replays) >= len(steps)


@torch.inference_mode()
def test_a_size_is_run_once_then_captured_then_replayed() -> None:
    model, fake = Model(), FakeGraphs()
    graphs = make_graphs(model.compute, fake)
    seen = []
    for seed in range(4):
        graphs(make_inputs(5, 9, 3, seed=seed))
        seen.append(list(fake.num_replays))
    assert seen == [[], [1], [2], [3]]
    graphs(make_inputs(5, 33, 3))  # more blocks
    graphs(make_inputs(5, 9, 3, 1, 1, 1))  # more sequences
    assert fake.num_replays == [3]


class Counting(FakeGraphs):
    """Knows which captures somebody still has."""

    def __init__(self) -> None:
        super().__init__()
        self._replays: list[weakref.ref[Callable[[], None]]] = []

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        replay = super().capture(launch)
        self._replays.append(weakref.ref(replay))
        return replay

    @property
    def are_kept(self) -> list[bool]:
        gc.collect()
        return [ref() is not None for ref in self._replays]


@torch.inference_mode()
def test_of_several_variants_the_last_one_is_kept() -> None:
    fake = Counting()
    graphs = make_graphs(Model().compute, fake)
    for variant in (0, 1, 2):
        for _ in range(2):
            graphs(make_inputs(5, 9), variant=variant)
    assert fake.are_kept == [True, False, True]


@torch.inference_mode()
def test_steps_go_on_without_graphs_if_they_cannot_be_captured(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    graphs = make_graphs(model.compute, FakeGraphs(RuntimeError("operation not permitted")))
    expected = make_graphs(model.compute)(make_inputs(5, 9)).clone()
    for _ in range(3):
        torch.testing.assert_close(graphs(make_inputs(5, 9)), expected)
    assert sum("operation not permitted" in record.message for record in caplog.records) == 1


@torch.inference_mode()
def test_the_largest_step_is_all_padding() -> None:
    model = Model()
    graphs = make_graphs(model.compute)
    assert model.written(graphs.compute_largest) == set()


# --- what a graph asks of a step ---


@pytest.fixture
def kernels_as_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernels are seen as one operation each, as they are on a device."""

    def seen(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            trace = _current_trace()
            if trace is None:
                return function(*args, **kwargs)
            with trace.kernel(name, *args, *kwargs.values()):
                outputs = function(*args, **kwargs)
            tensors = [one for one in torch.utils._pytree.tree_leaves(outputs) if isinstance(one, Tensor)]
            trace.make(tensors, [one for one in args if isinstance(one, Tensor)])
            return outputs

        return run

    for name in ("add_rms_norm", "rotary", "silu_and_mul"):
        monkeypatch.setattr(decoder_module, name, seen(getattr(paged_kernels, name), name))
    low_rank = seen(lambda out, x, table, tiles, room, adapters, rows: add_low_rank(out, x, adapters, rows), "low_rank")

    def add(out: Tensor, x: Tensor, adapters: Any, rows: Any) -> None:
        low_rank(out, x, adapters.table, rows.tiles(16, x.device), str(adapters.extent), adapters, rows)

    monkeypatch.setattr(lora_module, "add_low_rank", add)
    for name in ("store_kv", "paged_attention"):
        monkeypatch.setattr(paged_kernels.reference, name, seen(getattr(paged_kernels.reference, name), name))


def _current_trace() -> StepTrace | None:
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    return next((mode for mode in modes if isinstance(mode, StepTrace)), None)


class Recording(FakeGraphs):
    """Keeps what is captured, and replays nothing."""

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        self.launch = launch
        return lambda: None


def broken_rules_of(compute: Callable[[DecodeInputs], Tensor]) -> list[str]:
    """What keeps a step from being captured."""
    recording = Recording()
    graphs = make_graphs(compute, recording)
    requests = [make_inputs(5, 13, 1, seed=1), make_inputs(16, 2, 9, seed=2)]
    for _ in range(2):
        graphs(requests[0])
    return broken_rules(recording.launch, lambda which: graphs(requests[which]))


@pytest.mark.usefixtures("kernels_as_operations")
@torch.no_grad()
def test_a_whole_decode_step_can_be_captured() -> None:
    assert broken_rules_of(Model().compute) == []


@pytest.mark.usefixtures("kernels_as_operations")
@pytest.mark.parametrize(
    "breaks, what",
    [
        (lambda inputs, logits: logits * int(inputs.seq_lens.max()), "waits for the device"),
        (lambda inputs, logits: logits + logits[inputs.slot_mapping[0] >= 0].sum(), "waits for the device"),
        (lambda inputs, logits: logits + torch.tensor([1.0]), "from the host"),
        (lambda inputs, logits: logits + FRESH.pop(), "inputs moved"),
        (lambda inputs, logits: logits.repeat(1 + int(inputs.seq_lens.numpy()[0]) % 2, 1)[:4], "operation"),
    ],
    ids=["a number", "a mask", "a list", "a new input", "a shape"],
)
@torch.no_grad()
def test_a_step_that_cannot_is_found_out(breaks: Callable[[DecodeInputs, Tensor], Tensor], what: str) -> None:
    model = Model()
    broken = broken_rules_of(lambda inputs: breaks(inputs, model.compute(inputs)))
    assert any(what in rule for rule in broken), broken


# --- the engine ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def generated(folder: Path, **options: Any) -> list[Any]:
    settings = {"kv_cache_memory": "4MiB", "block_size": 4, "max_num_batched_tokens": 16, "attention_backend": "torch"}
    with LLM(folder, **settings | options) as llm:
        outputs = llm.generate(PROMPTS, PARAMS.replace(n=2), use_tqdm=False)
        outputs += llm.generate(PROMPTS[:2], PARAMS.replace(prompt_logprobs=1), use_tqdm=False)
    return [[(sample.token_ids, sample.text) for sample in output.outputs] for output in outputs]


def test_the_engine_writes_the_same_with_graphs(folder: Path) -> None:
    expected = generated(folder)
    for options in ({}, {"num_gpu_blocks_override": 14, "swap_space": 0.01}):
        fake = FakeGraphs()
        with graphs_on_cpu(fake):
            assert generated(folder, **options) == expected
        assert sum(fake.num_replays) > 10


def test_asynchronous_steps_are_replayed_with_tokens_that_the_device_alone_knows(folder: Path) -> None:
    fake = FakeGraphs()
    with graphs_on_cpu(fake):
        assert generated(folder, async_scheduling=True) == generated(folder)
    assert sum(fake.num_replays) > 10


# --- adapters ---


def adapted_outputs(folder: Path, adapters: list[LoRARequest | None], rounds: int = 2, **options: Any) -> list[Any]:
    """What prompts get from these adapters, several times over."""
    settings = {"kv_cache_memory": "4MiB", "block_size": 4, "attention_backend": "torch", "enable_lora": True}
    with LLM(folder, max_loras=2, **settings | options) as llm:
        params = PARAMS.replace(logprobs=None, max_tokens=6)
        prompts = [PROMPTS[number % 4] for number in range(len(adapters))]
        outputs = [llm.generate(prompts, params, lora_request=adapters, use_tqdm=False) for _ in range(rounds)]
    return [[output.outputs[0].token_ids for output in of_round] for of_round in outputs]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    """Of different modules and ranks."""
    parent, model = tmp_path_factory.mktemp("adapters"), make_model()
    kinds: list[tuple[tuple[str, ...], int]] = [
        (("q_proj", "v_proj"), 2),
        (("q_proj", "v_proj"), 4),
        (TARGETS, 8),
        (("down_proj", "lm_head"), 3),
    ]
    folders = [
        save_adapter(parent / str(number), model, targets=targets, rank=rank, seed=number, size=0.4)
        for number, (targets, rank) in enumerate(kinds)
    ]
    return [LoRARequest(folder.name, str(folder)) for folder in folders]


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_steps_with_adapters_are_replayed(folder: Path, adapters: list[LoRARequest], *, is_asynchronous: bool) -> None:
    """Also once others have taken their slots, and whatever was captured for those before."""
    wanted: list[LoRARequest | None] = [
        adapters[0],
        None,
        adapters[1],
        adapters[0],
        adapters[2],
        adapters[1],
        adapters[3],
    ]
    fake = FakeGraphs()
    with graphs_on_cpu(fake):
        outputs = adapted_outputs(folder, wanted, async_scheduling=is_asynchronous)
    assert outputs == adapted_outputs(folder, wanted)
    assert len({tuple(tokens) for tokens in outputs[0]}) == len(wanted)
    assert sum(fake.num_replays) > 5


class SlottedModel(Model):
    """A decoder with the adapters of slots."""

    def __init__(self, adapters: list[LoRARequest]) -> None:
        super().__init__()
        model = make_model(vocab_size=VOCAB, pad_token_id=None, eos_token_id=None)
        store = AdapterStore(model, EngineConfig(enable_lora=True))
        self.adapters = [store.get(adapter) for adapter in adapters]
        self.slots = AdapterSlots(2, torch.float32, torch.device("cpu"))
        self.decoder = adapted(FusedDecoder(model), model, self.slots)


@pytest.mark.usefixtures("kernels_as_operations")
@torch.no_grad()
def test_a_step_with_adapters_can_be_captured_and_replayed_for_others(adapters: list[LoRARequest]) -> None:
    model, recording = SlottedModel(adapters[:3]), Recording()
    graphs = make_graphs(model.compute, recording)
    first, second, large = model.adapters
    inputs = [make_inputs(5, 13, 1, seed=1), make_inputs(16, 2, 9, seed=2)]
    of_rows: list[list[Any]] = [[first, None, second], [None, second, first]]

    def fill(which: int) -> None:
        model.slots.begin(of_rows[which], graphs.num_rows(3))
        graphs(inputs[which], variant=model.slots.layout)

    for _ in range(2):
        fill(0)
    assert broken_rules(recording.launch, fill) == []
    layout = model.slots.layout
    model.slots.begin([first, first, second], graphs.num_rows(3))
    assert model.slots.layout == layout
    model.slots.begin([large, None, None], graphs.num_rows(3))
    assert model.slots.layout > layout


def test_enforce_eager_captures_nothing(folder: Path) -> None:
    fake = FakeGraphs()
    with graphs_on_cpu(fake):
        generated(folder, enforce_eager=True)
    assert fake.num_replays == []
