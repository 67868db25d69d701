"""This engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import protocol
from paged_backend import LLM, SamplingParams


def load(model: Path, precision: str, threads: int, options: dict[str, Any]) -> protocol.Engine:
    precisions = {"f32": {"dtype": "float32"}, "bf16": {"dtype": "bfloat16"}}
    settings = {"kv_cache_memory": "2GiB", **precisions.get(precision, {"quantization": precision}), **options}
    llm = LLM(str(model), **settings)

    def generate(conversations: list[protocol.Conversation], num_tokens: int) -> protocol.Counts:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        outputs = llm.chat(conversations, params, use_tqdm=False)
        return (
            sum(len(output.prompt_token_ids) for output in outputs),
            sum(len(output.outputs[0].token_ids) for output in outputs),
        )

    return protocol.Engine(generate, settings)


if __name__ == "__main__":
    protocol.serve("paged-backend", load)
