"""What sampling costs: the whole engine's rate with each kind of parameters, against greedy.

    python benchmarks/sampling.py --batches 1 8 32 64 --rounds 5

One engine, whose batches take turns round by round, in changing order; each row of each generates as many tokens. Run
it on a quiet machine; the ratios count, not the rates.
"""

from __future__ import annotations

import argparse
import statistics
import time

from paged_backend import LLM, SamplingParams
from rounds import versions
from workloads import Workload

GREEDY = "greedy"
KINDS = {
    GREEDY: SamplingParams(temperature=0),
    "temperature": SamplingParams(temperature=0.8, seed=1),
    "sampled": SamplingParams(temperature=0.8, top_p=0.95, top_k=50, seed=1),
    "top_p": SamplingParams(temperature=0.8, top_p=0.95, seed=1),
    "min_p": SamplingParams(temperature=0.8, min_p=0.05, seed=1),
    "penalties": SamplingParams(
        temperature=0, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.2, seed=1
    ),
    "logprobs": SamplingParams(temperature=0, logprobs=5),
}


def seconds(llm: LLM, kind: str, num_sequences: int, num_tokens: int, round_: int) -> float:
    """How long the batch took, its prompts included."""
    conversations = Workload(kind, num_sequences).conversations(round_)
    params = KINDS[kind].replace(max_tokens=num_tokens, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.chat(conversations, params, use_tqdm=False)
    total = time.perf_counter() - start
    assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="demo, or a model folder (default: demo)")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--kinds", nargs="+", default=list(KINDS)[1:], choices=list(KINDS)[1:])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32, 64])
    parser.add_argument("--num-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()

    print(f"{versions()}, {arguments.model} in {arguments.dtype}, {arguments.rounds} rounds")
    kinds = [GREEDY, *arguments.kinds]
    with LLM(arguments.model, dtype=arguments.dtype, kv_cache_memory="2GiB", enable_prefix_caching=False) as llm:
        for kind in kinds:
            seconds(llm, kind, 2, 4, 0)
        for batch in arguments.batches:
            times: dict[str, list[float]] = {kind: [] for kind in kinds}
            for round_ in range(1, arguments.rounds + 1):
                for kind in kinds[:: 1 if round_ % 2 else -1]:
                    times[kind].append(seconds(llm, kind, batch, arguments.num_tokens, round_))
            for kind, each in times.items():
                rate = batch * arguments.num_tokens / statistics.median(each)
                ratio = statistics.median(a / b for a, b in zip(times[GREEDY], each, strict=True))
                print(f"b{batch:<3} {kind:11} median {rate:7.1f} tokens/s, {ratio:.3f}x greedy", flush=True)


if __name__ == "__main__":
    main()
