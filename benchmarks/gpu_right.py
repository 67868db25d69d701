"""The stages of gpu_check.py that ask whether this GPU computes what it should: kernels against their definitions on
the same device, then whole engines against transformers and against themselves."""

from __future__ import annotations

import json
import pathlib
import random
import tempfile
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

import paged_kernels
from gpu_setup import BLOCK, TINY, Check, Pages, describe, make_llm, make_model
from paged_backend import LoRARequest, SamplingParams
from paged_kernels import reference
from paged_kernels.adapters import LowRankAdapters, Piece, RowIndex

_LARGEST_DIFFERENCE = 1e-2
_FEW_TARGETS = ("q_proj", "v_proj")
_VOCAB_SIZE = 128256


def kernels_are_right(check: Check) -> dict[str, Any]:
    """Each kernel against its definition, by the relative difference; the share of other tokens, of draws."""
    differences, errors = dict[str, float](), dict[str, str]()
    for part in (_attention, _rounded_caches, _head_sizes, _layers, _adapters, _changed_logits, _draws):
        try:
            differences |= part(check)
        except Exception as error:  # the others are checked all the same
            errors[part.__name__] = describe(error)
    wrong = {name: value for name, value in differences.items() if not value < _LARGEST_DIFFERENCE}
    worst = max(differences.values(), default=None)
    return {"is_right": not wrong | errors, "cases": len(differences), "worst": worst, "wrong": wrong | errors}


def _difference(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def _batches(check: Check) -> list[tuple[int, int, int]]:
    """Sequences, tokens of each, and how many of these are queries."""
    return [(3, 40, 1), (2, 50, 20)] if check.is_dry else [(3, 700, 1), (5, 4000, 1), (2, 300, 300), (3, 900, 70)]


def _attention(check: Check) -> dict[str, float]:
    found = {}
    num_heads = 32
    features: dict[str, dict[str, Any]] = {
        "plain": {},
        "window": {"window": 33},
        "chunk": {"chunk": 24},
        "softcap": {"softcap": 20.0},
        "sinks": {"sinks": torch.randn(num_heads, device=check.device)},
        "alibi": {"alibi_slopes": torch.linspace(0.01, 0.3, num_heads, device=check.device)},
    }
    for num_seqs, length, num_queries in _batches(check):
        pages = Pages(check, num_seqs, length, num_queries)
        for name, options in features.items():
            found[f"{num_seqs}x{length} q{num_queries} {name}"] = _attended(pages, **options)
    return found


def _rounded_caches(check: Check) -> dict[str, float]:
    found = {}
    dtypes = [torch.int8] if check.is_dry else [torch.int8, torch.float8_e5m2, torch.float8_e4m3fn]
    for num_seqs, length, num_queries in _batches(check):
        pages = Pages(check, num_seqs, length, num_queries)
        for dtype in dtypes:
            if dtype == torch.float8_e4m3fn and torch.cuda.get_device_capability() < (8, 9):
                continue
            found |= _rounded_cache(check, pages, dtype, f"{num_seqs}x{length} q{num_queries} {dtype}")
    return found


def _head_sizes(check: Check) -> dict[str, float]:
    """Each row of the tables in triton_configs.py, heads that are loaded in two parts, and latents."""
    shapes: dict[str, dict[str, Any]] = {
        "64": {"head_size": 64},
        "80": {"head_size": 80, "heads": (32, 32)},
        "256": {"head_size": 256, "heads": (16, 8)},
        "latents": {"head_size": 576, "heads": (16, 1), "value_size": 512},
    }
    found = {}
    for num_seqs, length, num_queries in (_batches(check)[0], _batches(check)[-1]):
        for name, shape in shapes.items():
            found[f"heads of {name} q{num_queries}"] = _attended(Pages(check, num_seqs, length, num_queries, **shape))
    return found


def _attended(pages: Pages, **options: Any) -> float:
    return _difference(pages.attend(**options), pages.attend(reference.paged_attention, **options))


def _rounded_cache(check: Check, pages: Pages, dtype: torch.dtype, name: str) -> dict[str, float]:
    """Storing and attending in a cache of 8 bits."""
    assert pages.values is not None
    key, value = (one.transpose(1, 2).flatten(0, 1) for one in (pages.keys, pages.values))
    slots = torch.arange(len(key), device=check.device)
    stored: list[list[Tensor]] = []
    for store in (paged_kernels.store_kv, reference.store_kv):
        caches = [torch.zeros(pages.keys.shape, dtype=dtype, device=check.device) for _ in "kv"]
        scales = [torch.zeros(pages.keys.shape[:3], dtype=torch.bfloat16, device=check.device) for _ in "kv"]
        store(key, value, *caches, slots, k_scales=scales[0], v_scales=scales[1])
        stored.append([*caches, *scales])
    ours = stored[0]
    widened = [one[0].float() * one[2][..., None].float() for one in stored]
    scales_of = {"k_scales": ours[2], "v_scales": ours[3]}
    kept, pages.keys, pages.values = (pages.keys, pages.values), ours[0], ours[1]
    try:
        attended = _attended(pages, **scales_of)
    finally:
        pages.keys, pages.values = kept
    return {f"{name} stored": _difference(*widened), f"{name} attended": attended}


def _layers(check: Check) -> dict[str, float]:
    """What is between matrix products."""
    x, residual, weight = check.random(7, 4096), check.random(7, 4096), check.random(4096)
    gates, cos, sin = check.random(7, 2 * 4096), check.random(7, 128), check.random(7, 128)
    query, key = check.random(7, 32, 128), check.random(7, 8, 128)

    def turned(kernels: Any, is_interleaved: bool) -> Tensor:
        heads = query.clone(), key.clone()
        kernels.rotary(*heads, cos, sin, interleaved=is_interleaved)
        return torch.cat(heads, dim=1)

    both, found = (paged_kernels, reference), {}
    for offset in (0.0, 1.0):
        sums = [kernels.add_rms_norm(x, residual.clone(), weight, 1e-5, offset=offset)[0] for kernels in both]
        found[f"add_rms_norm, offset {offset}"] = _difference(*sums)
    for activation in ("silu", "gelu_tanh"):
        gated = [kernels.silu_and_mul(gates, activation=activation) for kernels in both]
        found[f"silu_and_mul, {activation}"] = _difference(*gated)
    for is_interleaved in (False, True):
        of_both = [turned(kernels, is_interleaved) for kernels in both]
        found[f"rotary, interleaved: {is_interleaved}"] = _difference(*of_both)
    return found


def _adapters(check: Check) -> dict[str, float]:
    """Rows with three adapters and with none: a few, and many."""
    found = {}
    for num_rows in (9, 300):
        index = np.arange(num_rows, dtype=np.int32) % 4 - 1
        pieces = [[Piece(64, check.random(rank, 256), check.random(rank, 192))] for rank in (4, 16, 40)]
        adapters, rows, x = LowRankAdapters(pieces), RowIndex(index, 3), check.random(num_rows, 256)
        out = check.random(num_rows, 256)
        outs = out.clone(), out.clone()
        for kernels, out in zip((paged_kernels, reference), outs, strict=True):
            kernels.add_low_rank(out, x, adapters, rows)
        found[f"add_low_rank, {num_rows} rows"] = _difference(*outs)
    return found


def _changed_logits(check: Check) -> dict[str, float]:
    """Penalties, then a mask."""
    vocab_size = 1000 if check.is_dry else _VOCAB_SIZE
    logits = torch.randn(4, vocab_size, device=check.device)
    ids = torch.randperm(vocab_size)[:300].repeat(2).to(check.device)
    of_ids = torch.tensor([0, 2]).repeat_interleave(300).to(check.device)
    repetition, subtracted = torch.rand(2, 600, device=check.device) + 0.5
    rows = torch.tensor([3, 0], device=check.device)
    bitmask = torch.randint(-(2**31), 2**31, (2, -(-vocab_size // 32)), dtype=torch.int32)
    outs = logits.clone(), logits.clone()
    for kernels, out in zip((paged_kernels, reference), outs, strict=True):
        kernels.penalise(out, of_ids, ids, repetition, subtracted)
        kernels.mask_logits(out, rows, bitmask)
    return {"penalties and a mask": _difference(*(out.nan_to_num(neginf=-100.0) for out in outs))}


def _draws(check: Check) -> dict[str, float]:
    """Rows with all kinds of parameters: how many tokens differ, and the best logits."""
    num_rows, vocab_size = 64, 1000 if check.is_dry else _VOCAB_SIZE
    found = {}
    for dtype in (torch.float32, check.dtype):
        logits = (3 * torch.randn(num_rows, vocab_size, device=check.device)).to(dtype)
        generator = np.random.default_rng(0)

        def column(values: Any, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=check.device)

        columns = (
            column(generator.choice([0.0, 0.7, 1.0, 1.5], num_rows)),
            column(generator.choice([0.0, 0.0, 0.05], num_rows)),
            column(generator.choice([0, 1, 50, 5000], num_rows), torch.int64),
            column(generator.choice([1.0, 0.95, 0.5], num_rows)),
            column(generator.random(num_rows)),
        )
        drawn, expected = (kernels.draw(logits, *columns) for kernels in (paged_kernels, reference))
        differing = float((drawn != expected).double().mean())
        # A draw on the very border of two tokens may fall on either side.
        found[f"draw, {dtype}"] = 0.0 if differing <= 1 / num_rows else differing
        best, right = (kernels.best_logits(logits, expected, 20) for kernels in (paged_kernels, reference))
        for name, one, other in zip(("normalisers", "ranks", "values", "ids"), best, right, strict=True):
            found[f"best_logits, {dtype}: {name}"] = _difference(one, other)
    return found


def engine_is_right(check: Check) -> dict[str, Any]:
    """Greedy tokens of a small float32 model: those of transformers, with graphs, without, preempted and swapped."""
    model = _small_model(check)
    prompts = _prompts()
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=check.device)
        expected.append(model.generate(ids, max_new_tokens=40, do_sample=False)[0, len(prompt) :].tolist())
    ways: dict[str, dict[str, Any]] = {
        "graphs": {},
        "one step after the other": {"async_scheduling": False},
        "one step while another runs": {"async_scheduling": True},
        "eager": {"enforce_eager": True},
        "swapped": {"num_gpu_blocks_override": 24, "swap_space": 0.1},
        "chunked": {"max_num_batched_tokens": 16},
        "torch": {"attention_backend": "torch"},
    }
    found = {name: _same(_tokens(model, prompts, **settings), expected) for name, settings in ways.items()}
    return {name: f"{same} of {len(prompts)} as transformers" for name, same in found.items()}


def adapters_are_right(check: Check) -> dict[str, Any]:
    """Greedy tokens with adapters: the same with graphs, whose slots they take turns in, and without."""
    model, prompts = _small_model(check), _prompts()
    with tempfile.TemporaryDirectory() as folder:
        loras = [_save_adapter(model, pathlib.Path(folder, str(number)), seed=number) for number in range(3)]
        wanted = [[None, *loras][number % 4] for number in range(len(prompts))]
        settings: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "lora_requests": wanted}
        replayed = _tokens(model, prompts, **settings)
        eager = _tokens(model, prompts, enforce_eager=True, async_scheduling=False, **settings)
        plain = _tokens(model, prompts)
    others = sum(one != other for one, other, lora in zip(eager, plain, wanted, strict=True) if lora is not None)
    num_adapted = sum(lora is not None for lora in wanted)
    return {
        "graphs": f"{_same(replayed, eager)} of {len(prompts)} as without graphs",
        "changed": f"{others} of {num_adapted} by their adapters",
    }


def _small_model(check: Check) -> PreTrainedModel:
    config = LlamaConfig(**{**TINY, "eos_token_id": None, "pad_token_id": 0, "initializer_range": 0.15})
    return make_model(config, check.device, torch.float32)


def _prompts() -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(1, 272) for _ in range(draw.randint(5, 60))] for _ in range(12)]


def _tokens(
    model: PreTrainedModel, prompts: list[list[int]], *, lora_requests: Any = None, **settings: Any
) -> list[list[int]]:
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    _, llm = make_llm(model, max_num_seqs=16, kv_cache_memory="64MiB", block_size=BLOCK, **settings)
    with llm:
        outputs = llm.generate(prompts, params, lora_request=lora_requests, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def _same(tokens: list[list[int]], expected: list[list[int]]) -> int:
    return sum(one == other for one, other in zip(tokens, expected, strict=True))


def _save_adapter(model: PreTrainedModel, folder: pathlib.Path, *, seed: int) -> LoRARequest:
    """A random one of rank 4, 8 or 12, in PEFT's files."""
    generator, rank = torch.Generator().manual_seed(seed), 4 * (seed + 1)
    tensors = {}
    for name, module in model.named_modules():
        if name.endswith(_FEW_TARGETS):
            width, depth = module.weight.shape  # type: ignore[union-attr, misc]
            key = f"base_model.model.{name}.lora_"
            tensors[f"{key}A.weight"] = 0.3 * torch.randn(rank, int(depth), generator=generator)
            tensors[f"{key}B.weight"] = 0.3 * torch.randn(int(width), rank, generator=generator)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": _FEW_TARGETS, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return LoRARequest(folder.name, str(folder))
