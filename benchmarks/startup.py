"""Seconds from the start of a process to the first token, and what they are spent on.

    python benchmarks/startup.py --model demo --rounds 3

Each start is a process of its own. `warm` is what every start but the first is like. `cold` has no compiled kernels, as
the first start on a machine; the model is on the disk in either case.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

PARTS = ("import paged_backend", "import torch", "import transformers", "load and check", "first token")


def start(model: str, dtype: str) -> None:
    """What a child process does; prints the seconds at the end of each part, from when its parent started it."""
    begin = float(os.environ["BEGIN"])
    ends = {}

    def note(part: str) -> None:
        ends[part] = time.time() - begin

    from paged_backend import LLM, SamplingParams
    from paged_backend.garbage import no_garbage_collection

    note("import paged_backend")
    with no_garbage_collection():  # as in LLM, which imports the rest in any case
        import torch  # noqa: F401

        note("import torch")
        import paged_backend.model.runner
        import paged_backend.sampling.sampler  # noqa: F401

        note("import transformers")
    llm = LLM(model, dtype=dtype, kv_cache_memory="1GiB")
    note("load and check")
    llm.generate("Once upon a time", SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
    note("first token")
    print(json.dumps(ends))


def measure(model: str, dtype: str, kernel_folder: str | None) -> dict[str, float]:
    """Seconds of each part of one start."""
    environment: dict[str, Any] = {**os.environ, "BEGIN": str(time.time())}
    if kernel_folder is not None:
        environment["NUMBA_CACHE_DIR"] = kernel_folder
    command = [sys.executable, __file__, "--start", "--model", model, "--dtype", dtype]
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    ends = json.loads(output.splitlines()[-1])
    begins = [0.0, *(ends[part] for part in PARTS)]
    return {part: ends[part] - begin for part, begin in zip(PARTS, begins, strict=False)}


def report(name: str, starts: list[dict[str, float]]) -> None:
    totals = [sum(parts.values()) for parts in starts]
    medians = ", ".join(f"{part} {statistics.median(one[part] for one in starts):.2f}" for part in PARTS)
    print(f"{name}: {statistics.median(totals):.2f} s ({min(totals):.2f} to {max(totals):.2f}): {medians}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3, help="warm starts (default: 3)")
    parser.add_argument("--no-cold", action="store_true", help="leave out the cold start, which takes longest")
    parser.add_argument("--start", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.start:
        return start(arguments.model, arguments.dtype)

    measure(arguments.model, arguments.dtype, None)  # whatever was not compiled before
    report("warm", [measure(arguments.model, arguments.dtype, None) for _ in range(arguments.rounds)])
    if not arguments.no_cold:
        with tempfile.TemporaryDirectory() as folder:
            report("cold", [measure(arguments.model, arguments.dtype, folder)])


if __name__ == "__main__":
    main()
