"""Seconds that a transformers pipeline takes for a batch of prompts, without and with the engine, in turns.

    python benchmarks/transformers_adapter.py --rounds 5

`own` is transformers alone, `enabled` the same unmodified pipeline after `enable(model)`, both on padded batches of
`--batch-size`; `paged` is the task `paged-text-generation`, which pads nothing. Each lives in a process of its own.
Answers end where the model ends them, so prompts finish at different times. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from multiprocessing.connection import Connection

import torch
import transformers

from rounds import start, take_turns, versions
from workloads import Workload

KINDS = ("own", "enabled", "paged")


def make_pipeline(kind: str, name: str, dtype: str) -> transformers.TextGenerationPipeline:
    import transformers_paged

    if name == "demo":
        from paged_backend import demo_folder

        name = str(demo_folder())
    tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, dtype)).eval()
    if kind != "own":
        transformers_paged.enable(model, tokenizer, on_unsupported="error", kv_cache_memory="2GiB")
    task = "paged-text-generation" if kind == "paged" else "text-generation"
    return transformers.pipeline(task, model=model, tokenizer=tokenizer, device="cpu")


def serve(connection: Connection, kind: str, arguments: argparse.Namespace) -> None:
    """One pipeline's process: does each round it is sent and answers with the seconds it took."""
    pipe = make_pipeline(kind, arguments.model, arguments.dtype)
    options = {"do_sample": False, "max_new_tokens": arguments.num_tokens, "return_full_text": False}
    if kind != "paged":
        options["batch_size"] = arguments.batch_size
    pipe(Workload("warm-up", 2).conversations(0), **options | {"max_new_tokens": 4})
    connection.send("ready")
    while (round_ := connection.recv()) is not None:
        chats = Workload("round", arguments.num_prompts).conversations(round_)
        start = time.perf_counter()
        results = pipe(chats, **options)
        assert len(results) == len(chats)
        connection.send(time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="demo, or a model folder (default: demo)")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--num-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()

    pipelines = {kind: start(serve, kind, arguments) for kind in arguments.kinds}
    print(
        f"{versions()}, {arguments.model} in {arguments.dtype}, "
        f"{arguments.num_prompts} prompts in batches of {arguments.batch_size}, {arguments.num_tokens} tokens at most"
    )
    seconds = take_turns(pipelines, arguments.rounds, lambda round_: round_)
    first = arguments.kinds[0]
    for kind, values in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(seconds[first], values, strict=True))
        print(f"{kind:8} median {statistics.median(values):7.2f} s, best {min(values):7.2f}   {ratio:.2f}x {first}")
    for connection in pipelines.values():
        connection.send(None)


if __name__ == "__main__":
    main()
