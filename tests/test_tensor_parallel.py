"""A model in shards over several processes gives the tokens of one process; what goes wrong in one of them ends all."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from transformers import BertConfig, BertModel, MambaConfig, MambaForCausalLM, PreTrainedModel

from helpers_architectures import make_tiny
from helpers_models import EOS, VOCAB_SIZE, make_model, save_model
from paged_backend import (
    LLM,
    Backend,
    BeamSearchParams,
    ConfigError,
    EngineConfig,
    EngineDeadError,
    EngineError,
    ModelError,
    SamplingParams,
)
from paged_backend.backend import backend_of
from paged_backend.model.kv_cache import memory_for

WAIT_SECONDS = 60.0
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
CROWDED: dict[str, Any] = {
    "block_size": 4,
    "num_gpu_blocks_override": 30,
    "max_num_batched_tokens": 16,
    "dtype": "float32",
}
START = "hardly any room for all of them together"
PROMPTS = [START + " and so", "x", START + " or not", "a few words", START + " and so on"]

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="refused on Windows")


@functools.cache
def _folder_of(parent: Path, architecture: str) -> Path:
    return save_model(parent / architecture, model=make_model(architecture))


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    parent = tmp_path_factory.mktemp("models")
    return lambda architecture: _folder_of(parent, architecture)


def outcomes(llm: LLM) -> dict[str, Any]:
    """What all kinds of requests come to, many at once in little room, then again with what the prefix cache has."""
    sampled = SamplingParams(temperature=1.0, seed=5, n=2, max_tokens=6, ignore_eos=True)
    first = llm.generate(PROMPTS, GREEDY)
    again = llm.generate(PROMPTS[:1], GREEDY.replace(logprobs=0))[0].outputs[0]
    beams = llm.beam_search(START, BeamSearchParams(beam_width=2, max_tokens=4))[0].outputs
    return {
        "greedy": [output.outputs[0].token_ids for output in first],
        "again": again.token_ids,
        "logprobs": [score.logprob for scores in again.logprobs or [] for score in scores.values()],
        "sampled": [output.token_ids for output in llm.generate(START, sampled)[0].outputs],
        "beams": [beam.token_ids for beam in beams],
        "vector": llm.embed(START)[0].outputs.embedding,
    }


def assert_alike(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        if name in ("logprobs", "vector"):
            value = pytest.approx(value, abs=1e-4)
        assert actual[name] == value, name


def make_whole(folder: Path) -> dict[str, Any]:
    with LLM(str(folder), **CROWDED) as llm:
        return outcomes(llm)


def ranks_of(process: psutil.Process) -> list[psutil.Process]:
    return [child for child in process.children() if "rank_process" in " ".join(child.cmdline())]


def our_ranks() -> list[psutil.Process]:
    return ranks_of(psutil.Process())


def assert_gone(processes: list[psutil.Process]) -> None:
    assert processes
    _, alive = psutil.wait_procs(processes, timeout=WAIT_SECONDS)
    assert not alive


def test_two_ranks_give_what_one_gives(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("qwen3")
    expected = make_whole(folder)
    with LLM(str(folder), tensor_parallel_size=2, **CROWDED) as llm:
        ranks = our_ranks()
        actual, stats = outcomes(llm), llm.stats()
    assert len(ranks) == 1
    assert_alike(actual, expected)
    assert stats.num_preemptions > 0
    assert stats.num_prefix_hit_tokens > 0
    assert_gone(ranks)


def test_a_killed_rank_fails_all_requests_by_name_and_frees_the_others(folder_of: Callable[[str], Path]) -> None:
    with LLM(str(folder_of("llama")), tensor_parallel_size=2, **CROWDED) as llm:
        (rank,) = ranks = our_ranks()
        handles = [llm.submit(prompt, GREEDY.replace(max_tokens=60)) for prompt in PROMPTS[1:3]]
        next(iter(handles[0]))
        rank.kill()
        for handle in handles:
            with pytest.raises(EngineError, match=rf"rank 1 \(process {rank.pid}\) was ended by SIGKILL"):
                handle.result()
        with pytest.raises(EngineDeadError, match="rank 1"):
            llm.generate("x", GREEDY)
        assert llm.is_closed
        assert not dist.is_initialized()
        assert_gone(ranks)


def test_a_rank_that_dies_while_loading_is_named(folder_of: Callable[[str], Path]) -> None:
    killed: list[psutil.Process] = []
    threading.Thread(target=kill_first_rank, args=(killed,), daemon=True).start()
    with pytest.raises(EngineDeadError, match=r"rank 1 .* SIGKILL"):
        LLM(str(folder_of("llama")), tensor_parallel_size=2, **CROWDED)
    assert_gone(killed)
    assert not dist.is_initialized()


def kill_first_rank(killed: list[psutil.Process]) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < end and not killed:
        for rank in our_ranks():
            killed.append(rank)
            rank.kill()


def test_ranks_share_the_memory_of_a_cpu() -> None:
    one, two = (memory_for(EngineConfig(tensor_parallel_size=size), torch.device("cpu")) for size in (1, 2))
    assert two == pytest.approx(one / 2, rel=0.2)


def make_mamba() -> PreTrainedModel:
    sizes = {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 1, "pad_token_id": EOS, "eos_token_id": EOS}
    return MambaForCausalLM(MambaConfig(vocab_size=VOCAB_SIZE, **sizes)).eval()


def make_encoder() -> PreTrainedModel:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertModel(BertConfig(vocab_size=VOCAB_SIZE, **sizes)).eval()


class TestRefusals:
    """Before a process is started, with the way out."""

    @pytest.fixture(autouse=True)
    def no_ranks(self) -> Iterator[None]:
        yield
        assert our_ranks() == []

    @pytest.mark.parametrize("size", [0, -1, 1.5, True, "2"])
    def test_sizes_that_are_none(self, size: Any) -> None:
        with pytest.raises(ConfigError, match=r"tensor_parallel_size=.* must be an integer ≥ 1"):
            EngineConfig(tensor_parallel_size=size)

    @pytest.mark.parametrize("setting", [{"quantization": "int8"}, {"enable_lora": True}])
    def test_settings_that_do_not_go_together(self, setting: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match="does not work with tensor_parallel_size=2"):
            EngineConfig(tensor_parallel_size=2, **setting)

    def test_a_model_that_is_loaded_already(self) -> None:
        with pytest.raises(ConfigError, match="pass the name of the model or its folder"):
            LLM(make_model(), tensor_parallel_size=2)

    @pytest.mark.parametrize("size", [3, 4])
    def test_heads_that_cannot_be_shared_out(self, folder_of: Callable[[str], Path], size: int) -> None:
        with pytest.raises(ConfigError, match=r"cannot be shared out evenly; sizes that divide them: 1, 2"):
            LLM(str(folder_of("llama")), tensor_parallel_size=size)

    def test_a_model_without_a_plan(self, folder_of: Callable[[str], Path]) -> None:
        with pytest.raises(ConfigError, match=r"no plan for cutting .* \(gpt2\) into shards; leave it at 1"):
            LLM(str(folder_of("gpt2")), tensor_parallel_size=2)

    @pytest.mark.parametrize(
        ("make", "reason"), [(make_mamba, "keep states"), (make_encoder, "models that generate text")]
    )
    def test_models_that_take_no_packs(self, make: Callable[[], PreTrainedModel], reason: str, tmp_path: Path) -> None:
        make().save_pretrained(tmp_path)
        with pytest.raises(ConfigError, match=reason):
            LLM(str(tmp_path), tensor_parallel_size=2)

    def test_quantised_files(self, tmp_path: Path) -> None:
        save_model(tmp_path, config={"quantization_config": {"quant_method": "fp8"}})
        with pytest.raises(ConfigError, match="quantised or converted"):
            LLM(str(tmp_path), tensor_parallel_size=2)

    def test_a_process_that_uses_torch_distributed(self, folder_of: Callable[[str], Path]) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            with pytest.raises(ConfigError, match=r"torch\.distributed, which is in use in this process"):
                LLM(str(folder_of("llama")), tensor_parallel_size=2)
            assert dist.is_initialized()
        finally:
            dist.destroy_process_group()


@pytest.mark.slow
class TestMore:
    @pytest.mark.parametrize("architecture", ["gemma2", "phi3", "gpt_oss"])
    def test_other_architectures(self, folder_of: Callable[[str], Path], architecture: str) -> None:
        folder = folder_of(architecture)
        expected = make_whole(folder)
        with LLM(str(folder), tensor_parallel_size=2, **CROWDED) as llm:
            assert_alike(outcomes(llm), expected)

    def test_a_plan_that_changes_the_model_is_refused(self, tmp_path: Path) -> None:
        make_tiny("gemma3n_text").save_pretrained(tmp_path)
        with pytest.raises(ModelError, match="differs from a plain run"):
            LLM(str(tmp_path), tensor_parallel_size=2, dtype="float32")
        assert our_ranks() == []

    def test_three_ranks(self, tmp_path: Path) -> None:
        model = make_model(hidden_size=60, num_attention_heads=6, num_key_value_heads=3, intermediate_size=100)
        folder = save_model(tmp_path, model=model)
        expected = make_whole(folder)
        with LLM(str(folder), tensor_parallel_size=3, **CROWDED) as llm:
            ranks = our_ranks()
            assert_alike(outcomes(llm), expected)
        assert len(ranks) == 2
        assert_gone(ranks)

    def test_a_rank_that_hangs_is_named_and_ended(self, folder_of: Callable[[str], Path]) -> None:
        with LLM.from_backend(make_backend(folder_of("llama"), step_seconds=10.0)) as llm:
            (rank,) = ranks = our_ranks()
            handle = llm.submit([1, 2, 3], GREEDY.replace(max_tokens=200))
            next(iter(handle))
            rank.suspend()
            with pytest.raises(EngineDeadError, match=r"no answer from rank 1 .* not over in 10 s"):
                handle.result()
            assert_gone(ranks)

    def test_dropping_the_last_reference_ends_the_ranks(self, folder_of: Callable[[str], Path]) -> None:
        llm = LLM(str(folder_of("llama")), tensor_parallel_size=2, **CROWDED)
        ranks = our_ranks()
        del llm
        assert_gone(ranks)
        assert not dist.is_initialized()

    def test_no_rank_outlives_a_parent_that_is_killed(self, folder_of: Callable[[str], Path]) -> None:
        lines = ["handle = llm.submit('x', long)", "next(iter(handle))", "input()"]
        with Script(folder_of("llama"), "\n".join(lines)) as script:
            ranks = ranks_of(psutil.Process(script.process.pid))
            script.process.kill()
        assert_gone(ranks)

    def test_a_ctrl_c_ends_a_call_and_the_interpreters_end_the_ranks(self, folder_of: Callable[[str], Path]) -> None:
        lines = [
            "handle = llm.submit('x', long)",
            "try:",
            "    for output in handle:",
            "        os.killpg(os.getpgrp(), signal.SIGINT)",
            "except KeyboardInterrupt:",
            "    handle.abort()",
            "input()",
            "print(len(llm.generate('x', long.replace(max_tokens=3))[0].outputs[0].token_ids))",
            "handle = llm.submit('x', long)",
            "next(iter(handle))",
        ]
        with Script(folder_of("llama"), "\n".join(lines)) as script:
            ranks = ranks_of(psutil.Process(script.process.pid))
            output, _ = script.process.communicate(b"\n", timeout=WAIT_SECONDS)
        assert (script.process.returncode, output.split()) == (0, [b"3"])
        assert_gone(ranks)


class Script:
    """A program with a sharded `llm`, without a `__main__` guard; in this block it has come to its `input()`."""

    def __init__(self, folder: Path, rest: str) -> None:
        settings = CROWDED | {"tensor_parallel_size": 2}
        before = "import os, signal\nfrom paged_backend import LLM, SamplingParams\n"
        before += (
            f"long = SamplingParams(max_tokens=100, ignore_eos=True)\nllm = LLM({str(folder)!r}, **{settings!r})\n"
        )
        marked = rest.replace("input()", "os.write(1, b'!'), input()")
        self._arguments = [sys.executable, "-c", before + marked]

    def __enter__(self) -> Script:
        self.process = subprocess.Popen(
            self._arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.read(1) == b"!"
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate(timeout=WAIT_SECONDS)


def make_backend(folder: Path, *, step_seconds: float) -> Backend:
    from paged_backend.model.loader import load
    from paged_backend.model.ranks import Ranks
    from paged_backend.model.runner import ModelRunner

    config = EngineConfig(tensor_parallel_size=2, **CROWDED)
    ranks = Ranks(2, step_seconds=step_seconds)
    with ranks.loading():
        loaded = load(str(folder), None, config, ranks)
        runner = ModelRunner(loaded, config)
    return backend_of(loaded, runner)
