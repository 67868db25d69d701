"""The whole engine on the GPUs' kernels, interpreted: the tokens that the CPU's kernels give."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from triton.runtime.interpreter import GridExecutor

import paged_kernels
from helpers_lora import save_adapter
from helpers_models import make_model, save_model
from paged_backend import LLM, LoRARequest, RequestOutput, SamplingParams

pytestmark = [pytest.mark.timeout(280), pytest.mark.filterwarnings("ignore:.*encountered in")]

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)
SAMPLED = SamplingParams(
    temperature=0.9, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.3, seed=5, max_tokens=4, logprobs=3
)
KERNELS = {"store_tokens", "attend", "norm_rows", "turn_heads", "gate_rows", "begin_draws", "finish_draws", "list_best"}
PROMPTS = ["one prompt that is longer than a block of sixteen tokens", "another"]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the kernels that ran."""
    names: set[str] = set()
    run = GridExecutor.__call__

    def noting(self: GridExecutor, *args: object, **kwargs: object) -> None:
        names.add(self.fn.__name__)
        run(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", noting)
    return names


def generate(folder: Path, params: list[SamplingParams], **options: object) -> list[RequestOutput]:
    with LLM(folder, kv_cache_memory="1MiB", enable_lora="lora_request" in options) as llm:
        return llm.generate(PROMPTS, params, **options)


def token_ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_greedy_and_sampled_tokens_are_the_same(tmp_path, launched):
    folder = save_model(tmp_path, model=make_model(num_hidden_layers=2))
    expected = generate(folder, [GREEDY, SAMPLED])
    assert not launched
    with paged_kernels.interpreted():
        actual = generate(folder, [GREEDY, SAMPLED])
    assert launched >= KERNELS
    assert token_ids(actual) == token_ids(expected)
    for ours, theirs in zip(actual[1].outputs[0].logprobs, expected[1].outputs[0].logprobs, strict=True):
        assert {token: entry.rank for token, entry in ours.items()} == {t: entry.rank for t, entry in theirs.items()}
        logprobs = (torch.tensor([entry.logprob for entry in one.values()]) for one in (ours, theirs))
        torch.testing.assert_close(*logprobs)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen3", "gpt_oss"])
def test_other_models_give_the_same_tokens(tmp_path, architecture):
    """Heads that are normalised; and transformers' own code, with windows and sinks."""
    folder = save_model(tmp_path, model=make_model(architecture))
    expected = generate(folder, [GREEDY, SAMPLED])
    with paged_kernels.interpreted():
        assert token_ids(generate(folder, [GREEDY, SAMPLED])) == token_ids(expected)


@pytest.mark.slow
def test_adapters_and_grammars_give_the_same_tokens(tmp_path, launched):
    model = make_model(num_hidden_layers=2)
    folder, adapter = save_model(tmp_path / "model", model=model), save_adapter(tmp_path / "adapter", model)
    chosen = SamplingParams(temperature=0.0, max_tokens=4, structured_outputs={"choice": ["left", "right"]})
    options = {"lora_request": [LoRARequest("one", str(adapter)), None]}
    expected = generate(folder, [GREEDY, chosen], **options)
    with paged_kernels.interpreted():
        assert token_ids(generate(folder, [GREEDY, chosen], **options)) == token_ids(expected)
    assert launched >= {"shrink_rows", "expand_rows", "mask_rows"}
    assert token_ids(generate(folder, [GREEDY, chosen]))[0] != token_ids(expected)[0]


@pytest.mark.slow
def test_steps_that_are_replayed_while_others_run_give_the_same_tokens(tmp_path, launched, monkeypatch):
    """With adapters in slots; what would be replayed is launched again."""
    model = make_model(num_hidden_layers=2)
    folder, adapter = save_model(tmp_path / "model", model=model), save_adapter(tmp_path / "adapter", model)
    wanted = [LoRARequest("one", str(adapter)), None]
    with LLM(folder, kv_cache_memory="1MiB", enable_lora=True) as llm:
        expected = token_ids(llm.generate(PROMPTS, [GREEDY] * 2, lora_request=wanted))
    num_replays = []

    def capture(launch):
        return lambda: (num_replays.append(1), launch())

    monkeypatch.setattr("paged_backend.model.packed_run.cuda_capture", lambda device: capture)
    options = {"attention_backend": "triton", "async_scheduling": True, "enable_lora": True, "max_num_seqs": 2}
    with paged_kernels.interpreted(), LLM(folder, kv_cache_memory="1MiB", **options) as llm:
        assert token_ids(llm.generate(PROMPTS, [GREEDY] * 2, lora_request=wanted)) == expected
    assert launched >= {"attend", "shrink_rows", "expand_rows", "begin_draws"} and num_replays
