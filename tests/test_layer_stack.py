"""All layers in one call give the bits of the same kernels, called one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from helpers_models import make_model, save_model
from paged_backend import LLM, SamplingParams
from paged_backend.model.decoder import FusedDecoder
from paged_kernels.stack import LayerStack

PROMPTS = [list(range(40, 75)), [7], list(range(3, 20)) * 2]
GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, logprobs=2, prompt_logprobs=1)
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "llama with gelu": {"hidden_act": "gelu_pytorch_tanh"},
    "mistral": {"sliding_window": 8},
    "qwen2 with windows in some layers": {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 8},
    "qwen3": {},
}
ENGINES: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "bfloat16 in rows": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4", "kv_cache_dtype": "int8"},
}


def outputs_of(folder: Path, options: dict[str, Any]) -> list[Any]:
    """Prompts in chunks, beside sequences that decode; then hidden states."""
    engine = {"dtype": "bfloat16", "kv_cache_memory": "4MiB", "block_size": 4, "max_num_batched_tokens": 24}
    with LLM(folder, **engine | options) as llm:
        generated = [(output.outputs, output.prompt_logprobs) for output in llm.generate(PROMPTS, GREEDY)]
        return [*generated, *(output.outputs.embedding for output in llm.embed(PROMPTS))]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", MODELS)
def test_a_stack_gives_the_bits_of_its_layers(
    case: str, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paged_backend.model.packing.packs_bfloat16", lambda: engine == "bfloat16")
    wide = {} if engine == "bfloat16 in rows" else {"head_dim": 32}  # narrower layers are not packed
    folder = save_model(tmp_path, model=make_model(case.split()[0], **MODELS[case] | wide))
    calls: list[object] = []
    run = LayerStack.__call__
    monkeypatch.setattr(LayerStack, "__call__", lambda *args: calls.append(args) or run(*args))
    stacked = outputs_of(folder, ENGINES[engine])
    assert calls
    calls.clear()
    monkeypatch.setattr(FusedDecoder, "stack_layers", lambda *args: None)
    assert outputs_of(folder, ENGINES[engine]) == stacked
    assert not calls


def test_layers_that_differ_or_are_not_ours_stay_single(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[LayerStack] = []
    make = LayerStack.__init__
    monkeypatch.setattr(LayerStack, "__init__", lambda self, *args: made.append(self) or make(self, *args))
    folder = save_model(tmp_path, model=make_model("llama", head_dim=32))
    outputs_of(folder, {"dtype": "float32"})
    assert not made
    outputs_of(folder, {})
    assert made


def test_a_stack_holds_layers_of_one_kind() -> None:
    alike = weights_of(make_model("llama").bfloat16())
    assert LayerStack.can_hold(alike)
    assert not LayerStack.can_hold([*alike, *weights_of(make_model("llama", intermediate_size=96).bfloat16())])
    assert not any(weights_of(make_model("llama")))


def weights_of(model: PreTrainedModel) -> list[Any]:
    with torch.inference_mode():
        return [layer.weights() for layer in FusedDecoder(model)._layers]
