"""What speculative decoding by prompt lookup gains where text is copied, and costs where it is not.

    python benchmarks/speculation.py --rounds 5

`copy`: the model goes on with a text that it has read twice, with another name in it the second time. `free`: it
answers questions. Two engines, one with and one without speculation, live in a process each and take turns round by
round. Run it on a quiet machine; the ratios count. `--steps` prints instead how long a step takes by its number of
rows, which is what the rule that decides over drafts is made from.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from array import array
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from paged_backend import LLM, SamplingParams
from paged_backend.engine.request import BlockTable
from rounds import start, take_turns, versions
from workloads import WORKLOADS

NAMES = ("Anna", "Peter", "Ines", "Omar", "Lucia", "David", "Greta", "Felix")
TEXT = """\
{name} had worked at the harbour office for eleven years before the storm of that October. Every morning, a \
little before six, {name} walked along the quay, wrote down the level of the water and the names of the boats \
that had come in overnight, and then lit the stove in the small room above the boathouse. The fishermen trusted \
these notes more than the radio, because they were never wrong. On the evening of the ninth the wind turned to \
the north-west and did not stop. The first boats broke loose at ten, and by midnight the whole lower town was \
under water. {name} opened the office, carried the old ledgers to the attic one by one, and put a lamp into the \
window so that those who were still outside could see where the stairs began. Fourteen people spent the night \
there, sitting between the shelves and drinking tea from a single pot. Nobody spoke much. Around four in the \
morning the wind fell, and the water went back as quickly as it had come. When it was light, {name} took the \
notebook, walked down to the quay as on any other day, and wrote: high water, two metres and ten above the mark, \
no boats came in, fourteen guests. The page still hangs in the entrance of the new office, behind glass, next to \
a photograph of the lamp. Visitors often ask who wrote it, and the answer is always the same: somebody who was \
on time.
"""
CONFIG = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 2, "prompt_lookup_max": 4}


class Task(NamedTuple):
    """One round of one engine."""

    kind: str
    num_sequences: int
    round: int
    num_tokens: int


class Outcome(NamedTuple):
    """What a round took, and what the engine counted in it."""

    seconds: float
    num_draft_tokens: int
    num_accepted_tokens: int
    num_steps: int


def copy_prompt(index: int, round_: int) -> str:
    """A text, the text with another name, and its beginning once more; no two rounds share a prefix."""
    first, second = NAMES[index % len(NAMES)], NAMES[(index + 3) % len(NAMES)]
    beginning = TEXT.format(name=first)[:60]
    return f"Copy {100 * round_ + index}.\n\n{TEXT.format(name=first)}\n{TEXT.format(name=second)}\n{beginning}"


def run(llm: LLM, task: Task) -> float:
    params = SamplingParams(temperature=0, max_tokens=task.num_tokens, ignore_eos=True)
    prompts = [copy_prompt(index, task.round) for index in range(task.num_sequences)]
    conversations = WORKLOADS[f"b{task.num_sequences}"].conversations(task.round)
    start = time.perf_counter()
    if task.kind == "copy":
        llm.generate(prompts, params, use_tqdm=False)
    else:
        llm.chat(conversations, params, use_tqdm=False)
    return time.perf_counter() - start


def serve(connection: Connection, model: str, dtype: str, speculative_config: dict[str, Any] | None) -> None:
    """The process of one engine. Prompts are read before the clock starts: they take both engines the same."""
    llm = LLM(model, dtype=dtype, kv_cache_memory="2GiB", speculative_config=speculative_config)
    run(llm, Task("free", 1, 0, 8))
    connection.send("ready")
    while (task := connection.recv()) is not None:
        run(llm, task._replace(num_tokens=1))
        before, seconds, after = llm.stats(), run(llm, task), llm.stats()
        counts = (getattr(after, name) - getattr(before, name) for name in Outcome._fields[1:])
        connection.send(Outcome(seconds, *counts))


def measure(engines: dict[str, Connection], arguments: argparse.Namespace, kind: str, num_sequences: int) -> None:
    def task(round_: int) -> Task:
        return Task(kind, num_sequences, round_ + 100 * num_sequences, arguments.tokens)

    outcomes: dict[str, list[Outcome]] = take_turns(engines, arguments.rounds, task)
    num_tokens = num_sequences * arguments.tokens
    rates = {name: [num_tokens / outcome.seconds for outcome in each] for name, each in outcomes.items()}
    ratios = [a / b for a, b in zip(rates["ngram"], rates["off"], strict=True)]
    _, drafts, accepted, steps = zip(*outcomes["ngram"], strict=True)
    for name, values in rates.items():
        median = statistics.median(values)
        print(f"{kind:4} b{num_sequences:<3} {name:6} median {median:7.1f}, best {max(values):7.1f} tokens/s")
    print(
        f"ngram is {statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f}); "
        f"{sum(accepted)} of {sum(drafts)} drafts accepted, {sum(steps)} steps for "
        f"{sum(outcome.num_steps for outcome in outcomes['off'])}",
        flush=True,
    )


def print_steps(arguments: argparse.Namespace) -> None:
    """Seconds of the model alone, for some numbers of rows: of one sequence, and of as many sequences."""
    from paged_backend.backend import load_backend
    from paged_backend.config import EngineConfig
    from paged_backend.engine.request import Request
    from paged_backend.engine.scheduler import ScheduledSequence, SchedulerOutput

    config = EngineConfig(dtype=arguments.dtype, kv_cache_memory="2GiB")
    runner = load_backend(arguments.model, None, config).runner

    def scheduled(index: int, num_rows: int, length: int = 500) -> ScheduledSequence:
        params = SamplingParams()
        request = Request(request_id="", prompt_token_ids=[5] * length, params=params, max_tokens=1, seed=0)
        (sequence,) = request.sequences
        num_blocks = -(-length // config.block_size)
        sequence.num_computed_tokens = length - num_rows
        blocks = array("i", range(index * num_blocks, (index + 1) * num_blocks))
        sequence.tables = [BlockTable(blocks)]
        return ScheduledSequence(sequence, num_rows, num_rows)

    for num_rows in (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 32, 64):
        best = []
        for shape in ([num_rows], [1] * num_rows):
            output = SchedulerOutput([scheduled(*item) for item in enumerate(shape)], num_tokens=num_rows)
            seconds = []
            for _ in range(5 * arguments.rounds):
                begin = time.perf_counter()
                runner.execute(output)
                seconds.append(time.perf_counter() - begin)
            best.append(min(seconds) * 1000)
        print(
            f"{num_rows:3} rows of one sequence {best[0]:7.2f} ms, of as many sequences {best[1]:7.2f} ms", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="demo, or a model folder (default: demo)")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--kinds", nargs="+", default=["copy", "free"], choices=("copy", "free"))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32], choices=(1, 8, 32, 64))
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", action="store_true", help="print the time of a step by its rows instead")
    arguments = parser.parse_args()
    print(f"{versions()}, {arguments.model} in {arguments.dtype}, {arguments.rounds} rounds, {CONFIG}")
    if arguments.steps:
        return print_steps(arguments)
    configs = {"off": None, "ngram": CONFIG}
    engines = {name: start(serve, arguments.model, arguments.dtype, config) for name, config in configs.items()}
    for kind in arguments.kinds:
        for num_sequences in arguments.batches:
            measure(engines, arguments, kind, num_sequences)
    for engine in engines.values():
        engine.send(None)
    for process in multiprocessing.active_children():
        process.join()


if __name__ == "__main__":
    main()
