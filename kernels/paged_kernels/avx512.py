"""The loop of `quads.add_packed` over bfloat16 in AVX-512's own instructions, with its registers chosen here.

Of 32 registers 24 hold sums. LLVM moves some of them to memory and back, and the loop takes up to 1.4 times as long.
"""

from collections.abc import Sequence
from typing import Any

from llvmlite import binding, ir

binding.initialize_native_asmparser()  # which Numba does not need

_BYTES = 64  # of a register
_WEIGHTS, _NUMBERS = 24, 28  # the first registers that do not hold sums
_INT64 = ir.IntType(64)


def add_pair_products(
    builder: Any, sums: Any, num_rows: int, num_blocks: int, num_fetched: int, places: Sequence[Any]
) -> None:
    """sums[r, b] += products of the numbers of row r and the weights of block b, over some steps.

    A step is a register of pairs of weights of each block, and a pair of numbers of each row. `sums` is the address of
    `num_rows` times `num_blocks` registers of float32. `places`, all 64-bit integers, are the addresses of weights, of
    numbers, and of what is to be fetched as `quads.add_packed` has it; the distances in bytes between blocks, rows, and
    what is fetched; and how many steps there are, at least one.
    """
    assert num_rows in (1, 2, 3, 4, 6) and num_blocks in (2, 4) and num_rows * num_blocks <= _WEIGHTS
    *addresses, block_stride, row_stride, fetched_stride, num_steps = places
    changing = [*addresses, num_steps]
    constant = [
        *(builder.mul(stride, _INT64(factor)) for stride in (block_stride, fetched_stride) for factor in (1, 3)),
        *(builder.mul(row_stride, _INT64(factor)) for factor in (1, 3, 5)),
        builder.ptrtoint(sums, _INT64),
    ]
    constraints = [
        *["=&r"] * len(changing),
        *map(str, range(len(changing))),  # each begins where the result of that number ends
        *["r"] * len(constant),
        *(f"~{{zmm{i}}}" for i in range(_NUMBERS + 1)),
        "~{memory}",
        "~{flags}",
    ]
    inputs = [*changing, *constant]
    results = ir.LiteralStructType([_INT64] * len(changing))
    function_type = ir.FunctionType(results, [_INT64] * len(inputs))
    builder.asm(
        function_type, _text(num_rows, num_blocks, num_fetched), ",".join(constraints), inputs, side_effect=True
    )


def _text(num_rows: int, num_blocks: int, num_fetched: int) -> str:
    """In AT&T's syntax, where what is written to comes last."""
    weights, numbers, fetched, num_steps = (f"${i}" for i in range(4))  # $4 to $7 are what these are before
    blocks, ahead = _spaced(weights, {1: "$8", 3: "$9"}), _spaced(fetched, {1: "$10", 3: "$11"})
    rows = _spaced(numbers, {1: "$12", 3: "$13", 5: "$14"})
    sums = [f"%zmm{i}" for i in range(num_rows * num_blocks)]
    columns, row = [f"%zmm{_WEIGHTS + b}" for b in range(num_blocks)], f"%zmm{_NUMBERS}"
    memory = [f"{_BYTES * i}($15)" for i in range(len(sums))]

    lines = [f"vmovups {place}, {total}" for place, total in zip(memory, sums, strict=True)]
    lines += [".p2align 5", "1:"]
    lines += [f"prefetcht{0 if num_fetched == 1 else 1} {place}" for place in ahead[:num_fetched]]
    lines += [f"vmovdqu64 {blocks[b]}, {columns[b]}" for b in range(num_blocks)]
    for r in range(num_rows):
        lines += [f"vpbroadcastd {rows[r]}, {row}"]
        lines += [f"vdpbf16ps {row}, {columns[b]}, {sums[r * num_blocks + b]}" for b in range(num_blocks)]
    lines += [f"addq $${_BYTES}, {weights}", f"addq $${_BYTES}, {fetched}", f"addq $$4, {numbers}"]
    lines += [f"decq {num_steps}", "jnz 1b"]
    lines += [f"vmovups {total}, {place}" for place, total in zip(memory, sums, strict=True)]
    return "\n".join(lines)


def _spaced(base: str, strides: dict[int, str]) -> list[str]:
    """Places at the multiples 0, 1, ... of a distance, whose odd multiples are in registers."""
    places = [f"({base})"]
    for i in range(1, 6):
        found = [(strides[i // scale], scale) for scale in (1, 2, 4) if i % scale == 0 and i // scale in strides]
        places += [f"({base},{stride},{scale})" for stride, scale in found[:1]]
    return places
