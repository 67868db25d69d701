"""How many slots of the KV cache are held without holding anything.

    python benchmarks/kv_waste.py --block-size 16

Runs the real scheduler over requests of mixed lengths, on a model that computes nothing: waste depends on lengths
alone. For comparison, it prints what a cache reserved for each request's longest possible length would waste.
"""

from __future__ import annotations

import argparse
import random
from typing import NamedTuple

from paged_backend import LLM, Backend, SamplingParams


class Token(NamedTuple):
    token_id: int = 5
    logprobs: None = None


class NullRunner:
    """Holds no keys or values and gives no logits."""

    vocab_size = 1000

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size

    def execute(self, output: object) -> None:
        return None

    def rows(self, logits: None, rows: list[int]) -> None:
        return None


class NullSampler:
    def sample(self, logits: None, sequences: list[object]) -> list[Token]:
        return [Token() for _ in sequences]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--cache-tokens", type=int, default=65536, help="slots of the cache (default: 65536)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    lengths = random.Random(arguments.seed)
    prompts = [[lengths.randrange(1000) for _ in range(lengths.randint(20, 600))] for _ in range(arguments.requests)]
    num_outputs = [lengths.randint(16, 256) for _ in prompts]
    backend = Backend(
        name="null",
        runner=NullRunner(arguments.cache_tokens // arguments.block_size, arguments.block_size),
        sampler=NullSampler(),
        tokenizer=None,
        max_model_len=856,
    )
    params = [SamplingParams(max_tokens=num) for num in num_outputs]
    with LLM.from_backend(backend, max_num_batched_tokens=512) as llm:
        llm.generate(prompts, params, use_tqdm=False)
        stats = llm.stats()
    # Over its life a request holds its whole reservation while its length grows from the prompt's to the last.
    held = sum(len(prompt) + num / 2 for prompt, num in zip(prompts, num_outputs, strict=True)) / len(prompts)
    print(
        f"{arguments.requests} requests, prompts of 20-600 and outputs of 16-256 tokens, blocks of "
        f"{arguments.block_size}: {stats.kv_waste_ratio:.2%} of held slots were empty, over {stats.num_steps} steps "
        f"with {stats.num_preemptions} preemptions"
    )
    print(f"reserving the longest length (856 tokens) for each would leave {1 - held / 856:.0%} empty")


if __name__ == "__main__":
    main()
