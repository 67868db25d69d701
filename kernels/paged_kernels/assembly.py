"""Loops of `quads.add_packed` in the processor's own instructions, with their registers chosen here.

Nearly all registers hold sums: 24 of AVX-512's 32, or 12 of AVX2's 16. LLVM moves some of them to memory and back, and
the loops take up to 1.4 times as long.
"""

from collections.abc import Sequence
from typing import Any

from llvmlite import binding, ir
from numba.core import cgutils

binding.initialize_native_asmparser()  # which Numba does not need

_INT32, _INT64 = ir.IntType(32), ir.IntType(64)


def add_pair_products(
    builder: Any, sums: Any, num_rows: int, num_blocks: int, num_fetched: int, places: Sequence[Any]
) -> None:
    """sums[r, b] += products of the numbers of row r and the weights of block b, over some steps, with AVX-512.

    A step is a register of pairs of bfloat16 weights of each block, and a pair of numbers of each row. `sums` is the
    address of `num_rows` times `num_blocks` registers of float32. `places`, all 64-bit integers, are the addresses of
    weights, of numbers, and of what is to be fetched as `quads.add_packed` has it; how many steps there are, at least
    one; and the distances in bytes between blocks, what is fetched, and rows.
    """
    assert num_rows in (1, 2, 3, 4, 6) and num_blocks in (2, 4) and num_rows * num_blocks <= 24
    *changing, block_stride, fetched_stride, row_stride = places
    strides = [builder.mul(stride, _INT64(factor)) for stride in (block_stride, fetched_stride) for factor in (1, 3)]
    rows = [builder.mul(row_stride, _INT64(factor)) for factor in (1, 3, 5)]
    text = _pair_products(num_rows, num_blocks, num_fetched)
    _emit(builder, text, changing, [*strides, *rows, builder.ptrtoint(sums, _INT64)], "zmm", 29)


def add_halves(builder: Any, sums: Sequence[Any], places: Sequence[Any], *, of_bytes: bool) -> None:
    """sums[r] += products of the numbers of row r and the weights of a block, over some steps, with AVX2.

    A step is two registers of weights, 32 bits of a column in each lane: four bytes, or two bfloat16. They are widened
    in two halves, the even-numbered and the others, and multiplied with 32 bits of each row for each half: two numbers
    of 16 bits, or a float32. `sums` are the addresses of at most six times 16 32-bit integers or float32. `places` are
    as `add_pair_products` has them, but for the distances between blocks and what is fetched.
    """
    assert 1 <= len(sums) <= 6
    *changing, row_stride = places
    rows = [builder.mul(row_stride, _INT64(factor)) for factor in (1, 3, 5)]
    bits = 0x00FF00FF if of_bytes else 0xFFFF0000
    mask = cgutils.alloca_once_value(builder, ir.Constant(ir.ArrayType(_INT32, 8), [bits] * 8))
    array = cgutils.alloca_once(builder, ir.ArrayType(sums[0].type.pointee, len(sums)))
    items = [cgutils.gep_inbounds(builder, array, 0, i) for i in range(len(sums))]
    for place, item in zip(sums, items, strict=True):
        builder.store(builder.load(place), item)
    constant = [*rows, *(builder.ptrtoint(address, _INT64) for address in (array, mask))]
    _emit(builder, _products_of_halves(len(sums), of_bytes), changing, constant, "ymm", 16)
    for place, item in zip(sums, items, strict=True):
        builder.store(builder.load(item), place)


def _emit(
    builder: Any, text: str, changing: Sequence[Any], constant: Sequence[Any], register: str, num_registers: int
) -> None:
    """A piece of code that counts some integers up or down and only reads others."""
    constraints = [
        *["=&r"] * len(changing),
        *map(str, range(len(changing))),  # each begins where the result of that number ends
        *["r"] * len(constant),
        *(f"~{{{register}{i}}}" for i in range(num_registers)),
        "~{memory}",
        "~{flags}",
    ]
    inputs = [*changing, *constant]
    results = ir.LiteralStructType([_INT64] * len(changing))
    builder.asm(ir.FunctionType(results, [_INT64] * len(inputs)), text, ",".join(constraints), inputs, side_effect=True)


# In AT&T's syntax, where what is written to comes last. $0 to $3 are weights, numbers, what is fetched and the number
# of steps; $4 to $7 what these are before; then come the constant ones.


def _pair_products(num_rows: int, num_blocks: int, num_fetched: int) -> str:
    blocks, ahead = _spaced("$0", {1: "$8", 3: "$9"}), _spaced("$2", {1: "$10", 3: "$11"})
    rows = _spaced("$1", {1: "$12", 3: "$13", 5: "$14"})
    sums = [f"%zmm{i}" for i in range(num_rows * num_blocks)]
    columns, row = [f"%zmm{24 + b}" for b in range(num_blocks)], "%zmm28"
    step = [f"prefetcht{0 if num_fetched == 1 else 1} {place}" for place in ahead[:num_fetched]]
    step += [f"vmovdqu64 {blocks[b]}, {columns[b]}" for b in range(num_blocks)]
    for r in range(num_rows):
        step += [f"vpbroadcastd {rows[r]}, {row}"]
        step += [f"vdpbf16ps {row}, {columns[b]}, {sums[r * num_blocks + b]}" for b in range(num_blocks)]
    return _loop(sums, [f"{64 * i}($15)" for i in range(len(sums))], step, 4)


def _products_of_halves(num_rows: int, of_bytes: bool) -> str:
    rows = _spaced("$1", {1: "$8", 3: "$9", 5: "$10"})
    sums = [f"%ymm{i}" for i in range(2 * num_rows)]
    columns, row, product = ("%ymm12", "%ymm13"), "%ymm14", "%ymm15"
    masked, shifted = "vpand ($12),", "vpsrlw $$8," if of_bytes else "vpslld $$16,"
    step = ["prefetcht0 ($2)"]
    for half, widened in enumerate((masked, shifted) if of_bytes else (shifted, masked)):
        step += [f"vmovdqu {32 * i}($0), {columns[i]}" for i in range(2)]
        step += [f"{widened} {column}, {column}" for column in columns]
        for r in range(num_rows):
            first, second = sums[2 * r : 2 * r + 2]
            step += [f"vpbroadcastd {4 * half}{rows[r]}, {row}"]
            if of_bytes:
                step += [f"vpmaddwd {row}, {columns[0]}, {product}", f"vpmaddwd {row}, {columns[1]}, {row}"]
                step += [f"vpaddd {product}, {first}, {first}", f"vpaddd {row}, {second}, {second}"]
            else:
                step += [f"vfmadd231ps {row}, {columns[0]}, {first}", f"vfmadd231ps {row}, {columns[1]}, {second}"]
    return _loop(sums, [f"{32 * i}($11)" for i in range(len(sums))], step, 8)


def _loop(sums: Sequence[str], memory: Sequence[str], step: Sequence[str], bytes_of_numbers: int) -> str:
    lines = [f"vmovups {place}, {total}" for place, total in zip(memory, sums, strict=True)]
    lines += [".p2align 5", "1:", *step]
    lines += ["addq $$64, $0", "addq $$64, $2", f"addq $${bytes_of_numbers}, $1", "decq $3", "jnz 1b"]
    lines += [f"vmovups {total}, {place}" for place, total in zip(memory, sums, strict=True)]
    return "\n".join(lines)


def _spaced(base: str, strides: dict[int, str]) -> list[str]:
    """Places at the multiples 0, 1, ... of a distance, whose odd multiples are in registers."""
    places = [f"({base})"]
    for i in range(1, 6):
        found = [(strides[i // scale], scale) for scale in (1, 2, 4) if i % scale == 0 and i // scale in strides]
        places += [f"({base},{stride},{scale})" for stride, scale in found[:1]]
    return places
