"""What the Triton kernels use of each GPU, read from code that is compiled for it here, without a GPU.

`python benchmarks/gpu_kernels.py` writes the table of docs/kernels.md.

Every kernel is called as the engine calls it, on a pretend GPU. `python benchmarks/gpu_kernels.py TARGET` prints what
is wrong with the code for one target, one line per problem, and nothing if all is well; the tests do that.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton

from gpu_cases import AROUND_ATTENTION, meta
from paged_kernels.triton_attention import AttentionPlan, paged_attention, store_kv
from pretend_gpu import SHARED_MEMORY, TARGETS, Compiled, Resources, pretend_gpu, resources_of

_DOCUMENT = pathlib.Path(__file__).parents[1] / "docs" / "kernels.md"
_FIRST_LINE, _LAST_LINE = "<!-- table: python benchmarks/gpu_kernels.py -->", "<!-- end of table -->"


def attend_and_store(
    num_tokens: int,
    num_sequences: int,
    heads: tuple[int, int],
    head_sizes: tuple[int, int],
    *,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    block_size: int = 16,
    values_in_keys: bool = False,
    **options: Any,
) -> None:
    """One layer of a step: all sequences have one query each if there are as many tokens."""
    cache_dtype = cache_dtype or dtype
    sizes = [head_sizes[0], None if values_in_keys else head_sizes[1]]
    caches = [size and meta(1000, heads[1], block_size, size, dtype=cache_dtype) for size in sizes]
    scales = {}
    if cache_dtype.itemsize == 1:
        scales = {f"{x}_scales": size and meta(1000, heads[1], block_size) for x, size in zip("kv", sizes, strict=True)}
    key_and_value = [size and meta(num_tokens, heads[1], size, dtype=dtype) for size in sizes]
    store_kv(*key_and_value, *caches, meta(num_tokens, dtype=torch.int64), **scales)
    options["value_size"] = head_sizes[1]
    indices = [
        meta(*shape, dtype=torch.int32) for shape in ((num_sequences, 512), (num_sequences + 1,), (num_sequences,))
    ]
    plan = AttentionPlan(num_sequences if num_tokens == num_sequences else 0, 512 * block_size)
    paged_attention(
        meta(num_tokens, heads[0], head_sizes[0], dtype=dtype),
        *caches,
        *indices,
        scale=0.1,
        plan=plan,
        **scales,
        **options,
    )


DECODE, PREFILL = (8, 8), (4096, 2)  # tokens, sequences
CASES: dict[str, Callable[[], None]] = {
    "decode, heads of 128": lambda: attend_and_store(*DECODE, (32, 8), (128, 128)),
    "prefill, heads of 128": lambda: attend_and_store(*PREFILL, (32, 8), (128, 128)),
    "decode, heads of 256": lambda: attend_and_store(*DECODE, (16, 8), (256, 256), softcap=50.0, window=4096),
    "prefill, heads of 256": lambda: attend_and_store(*PREFILL, (16, 8), (256, 256), softcap=50.0, window=4096),
    "decode, latents": lambda: attend_and_store(*DECODE, (128, 1), (576, 512), values_in_keys=True),
    "decode, heads of 80": lambda: attend_and_store(
        *DECODE, (32, 32), (80, 80), alibi_slopes=meta(32, dtype=torch.float32)
    ),
    "prefill, heads of 96": lambda: attend_and_store(*PREFILL, (32, 32), (96, 96), chunk=8192),
    "prefill, heads of 64": lambda: attend_and_store(
        *PREFILL, (64, 8), (64, 64), window=128, sinks=meta(64, dtype=torch.float32)
    ),
    "decode, heads of 64, e5m2 cache": lambda: attend_and_store(
        *DECODE, (64, 8), (64, 64), cache_dtype=torch.float8_e5m2, window=128, sinks=meta(64, dtype=torch.float32)
    ),
    "decode, heads of 128, int8 cache": lambda: attend_and_store(*DECODE, (32, 8), (128, 128), cache_dtype=torch.int8),
    "prefill, heads of 128, int8 cache": lambda: attend_and_store(
        *PREFILL, (32, 8), (128, 128), cache_dtype=torch.int8
    ),
    "decode, heads of 128, e4m3 cache": lambda: attend_and_store(
        *DECODE, (32, 8), (128, 128), cache_dtype=torch.float8_e4m3fn
    ),
    "heads of 128, float32": lambda: attend_and_store(*DECODE, (32, 8), (128, 128), dtype=torch.float32),
    "heads of 256, float32": lambda: attend_and_store(*PREFILL, (16, 8), (256, 256), dtype=torch.float32),
    "heads of 128, float32, int8 cache": lambda: attend_and_store(
        *DECODE, (32, 8), (128, 128), dtype=torch.float32, cache_dtype=torch.int8
    ),
    **AROUND_ATTENTION,
}
"""What is compiled for each target: every kernel in every shape that has a configuration of its own."""
_WIDE_ALONE = ("norm_rows", "gate_rows")
_WIDE = (*_WIDE_ALONE, "begin_draws", "describe_rows", "shrink_rows")
_ITEMSIZES = {"*bf16": 2, "*fp16": 2, "*fp32": 4}
NOT_ON = {"sm_80": ("decode, heads of 128, e4m3 cache",)}


def compile_cases(target: str, only: str = "") -> dict[tuple[str, str], tuple[Compiled, Resources]]:
    """By case and kernel: all cases, or those with this in their names.

    A variant that two cases share is in the first: it is compiled once.
    """
    found: dict[tuple[str, str], tuple[Compiled, Resources]] = {}
    for case, run in CASES.items():
        if only not in case or case in NOT_ON.get(target, ()):
            continue
        with pretend_gpu(target) as gpu:
            run()
        for compiled in gpu.compiled.values():
            found[case, compiled.kernel] = compiled, resources_of(compiled)
    return found


def problems_of(compiled: Compiled, resources: Resources) -> list[str]:
    """Which rules the code breaks.

    No spilled registers: on NVIDIA no local memory at all, on AMD no vector registers in memory (scalar ones may be in
    vector registers). Shared memory within the limit. On NVIDIA, loads of 16 bytes where whole rows are read, and none
    of 1 or 2 bytes where a program reads one row of hidden states. And for what goes through the KV cache: as many of
    these loads as that takes, and as many buffers of keys and values as the configuration asks for.
    """
    problems = []
    if resources.num_spills:
        problems.append(f"{resources.num_spills} spills")
    if resources.shared_memory > SHARED_MEMORY[compiled.target]:
        problems.append(f"{resources.shared_memory} bytes of shared memory, above {SHARED_MEMORY[compiled.target]}")
    if compiled.kernel == "attend":
        problems += _problems_of_loads(compiled, resources)
    elif compiled.target.startswith("sm_"):
        if compiled.kernel in _WIDE and not resources.wide_loads:
            problems.append("no loads of 16 bytes")
        if compiled.kernel in _WIDE_ALONE and compiled.constants.get("ROWS", 1) == 1 and resources.narrow_loads:
            problems.append(f"{resources.narrow_loads} loads of 1 or 2 bytes")
    return problems


def _problems_of_loads(compiled: Compiled, resources: Resources) -> list[str]:
    constants, problems = compiled.constants, []
    itemsize = _ITEMSIZES.get(compiled.signature["k_cache_ptr"], 1)
    tile_bytes = constants["KEYS"] * (constants["KEY_COLUMNS"] + constants["VALUE_COLUMNS"]) * itemsize
    bytes_per_load = 16 * compiled.num_warps * TARGETS[compiled.target].warp_size
    if resources.wide_loads * bytes_per_load < tile_bytes:
        problems.append(f"{resources.wide_loads} loads of 16 bytes per thread, too few for keys and values")
    if itemsize > 1 and compiled.target.startswith("sm_"):
        if resources.narrow_loads:
            problems.append(f"{resources.narrow_loads} loads of 1 or 2 bytes")
        if resources.shared_memory < (compiled.num_stages - 1) * tile_bytes:
            problems.append(
                f"{resources.shared_memory} bytes of shared memory, too few for its {compiled.num_stages} stages"
            )
    return problems


def table() -> str:
    """Registers per thread and shared memory per program, as Markdown."""
    by_target = {target: compile_cases(target) for target in TARGETS}
    rows = list(dict.fromkeys(row for found in by_target.values() for row in found))
    lines = [f"| kernel, case | {' | '.join(TARGETS)} |", f"| --- {'| --- ' * len(TARGETS)}|"]
    for case, kernel in rows:
        cells = [_cell(found.get((case, kernel))) for found in by_target.values()]
        lines.append(f"| `{kernel}`: {case} | {' | '.join(cells)} |")
    return "\n".join([f"Compiled by Triton {triton.__version__}.", "", *lines])


def _cell(found: tuple[Compiled, Resources] | None) -> str:
    if found is None:
        return "–"
    compiled, resources = found
    product = f", {resources.matrix_products}" if resources.matrix_products else ""
    return f"{resources.num_registers} / {resources.shared_memory / 1024:.0f} K, {compiled.num_warps} w{product}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", nargs="?", choices=TARGETS)
    parser.add_argument("--only", default="", help="check only cases with this in their names")
    args = parser.parse_args()
    if args.target is None:
        text = _DOCUMENT.read_text()
        pattern = rf"(?<={re.escape(_FIRST_LINE)}\n).*(?={re.escape(_LAST_LINE)})"
        new, num_replaced = re.subn(pattern, lambda _: f"\n{table()}\n\n", text, flags=re.DOTALL)
        if num_replaced != 1:
            sys.exit(f"{_DOCUMENT} has no lines {_FIRST_LINE} and {_LAST_LINE}")
        _DOCUMENT.write_text(new)
        return
    for (case, kernel), found in compile_cases(args.target, args.only).items():
        for problem in problems_of(*found):
            print(f"{args.target}, {kernel}, {case}: {problem}")


if __name__ == "__main__":
    main()
