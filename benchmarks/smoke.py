"""Is it still fast? This engine and transformers' `generate` on the same weights, in turns; two minutes.

    python benchmarks/smoke.py

For everyday use; `compare.py` compares with more engines, more carefully. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from compare import measure, warm_up
from engines import Setup, available_threads, start
from rounds import versions
from workloads import WORKLOADS

ENGINES = ("paged:bf16", "generate:bf16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=["b1", "b8", "b32"], choices=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()

    print(versions())
    setup = Setup("demo", Path(sys.prefix), available_threads())
    engines = {name: start(name, setup) for name in ENGINES}
    for name in arguments.workloads:
        warm_up(engines, WORKLOADS[name])
        ours, theirs = measure(engines, WORKLOADS[name], arguments.rounds).values()
        factor = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        print(f"{name}: {factor:.2f} times as fast as generate")
    for engine in engines.values():
        engine.close()


if __name__ == "__main__":
    main()
