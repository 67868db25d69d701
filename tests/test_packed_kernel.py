"""`packed_linear` on weights of 16, 8 and 4 bits, and each row's bits are its own."""

import math
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paged_kernels import PackedWeight, pack, pack_numbers, packed_linear, reference
from paged_kernels.packing import can_be_merged, factors_for, merge, rotate, split

each_size = pytest.mark.parametrize("bits", [16, 8, 4])
rounded = pytest.mark.parametrize("bits", [8, 4])


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def assert_agrees(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> None:
    """A number between two roundings may go either way, since the rotation's sums are taken in another order."""
    actual, expected = packed_linear(x, weight, bias), reference.packed_linear(x, weight, bias)
    assert actual.dtype == expected.dtype == x.dtype
    tolerance = max(torch.finfo(x.dtype).eps, 2e-3)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * float(expected.float().abs().max()))


@each_size
@pytest.mark.parametrize("depth", [1, 6, 64, 100, 576])
@pytest.mark.parametrize("num_columns", [1, 16, 45, 200])
def test_every_shape_gives_the_definition(num_columns: int, depth: int, bits: int) -> None:
    weight, bias = pack(random(num_columns, depth), bits), random(num_columns)
    for num_rows in (1, 2, 3, 4, 5, 6, 13, 70):
        x = random(num_rows, depth)
        assert_agrees(x, weight)
        assert_agrees(x, weight, bias)


@rounded
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_rows_and_bias_may_be_of_any_type(dtype: torch.dtype, bits: int) -> None:
    assert_agrees(random(7, 96, dtype=dtype), pack(random(40, 96), bits), random(40, dtype=dtype))


@each_size
def test_more_rows_than_are_multiplied_at_once_work(bits: int) -> None:
    assert_agrees(random(600, 64), pack(random(40, 64), bits))


@pytest.mark.parametrize(("bits", "most"), [(8, 0.013), (4, 0.1)])
def test_the_product_is_near_the_one_of_the_weights_that_were_rounded(bits: int, most: float) -> None:
    x, weight = random(20, 576, dtype=torch.float32), random(300, 576, dtype=torch.float32)
    right = x @ weight.T
    error = packed_linear(x, pack(weight, bits)) - right
    assert error.norm() < most * right.norm()


@pytest.mark.parametrize("depth", [1, 48, 576, 1536, 100])
def test_a_rotation_is_its_own_inverse_and_changes_no_product(depth: int) -> None:
    x, weight = random(3, depth, dtype=torch.float32), random(5, depth, dtype=torch.float32)
    torch.testing.assert_close(rotate(rotate(x)), x, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rotate(x) @ rotate(weight).T, x @ weight.T, rtol=1e-4, atol=1e-4)


def test_one_large_input_does_not_drown_the_others() -> None:
    x, weight = random(20, 576, dtype=torch.float32), random(300, 576, dtype=torch.float32)
    x[:, 100] = 50
    right = x @ weight.T
    error = packed_linear(x, pack(weight, 8)) - right
    assert error.norm() < 0.04 * (right - 50 * weight[:, 100]).norm()


def unequal_inputs(num_rows: int, depth: int) -> Tensor:
    """A few are far larger than the others, in all rows."""
    x = random(num_rows, depth, dtype=torch.float32)
    x[:, ::50] *= 40
    return x


@rounded
@pytest.mark.parametrize("depth", [6, 64, 100, 576])
def test_factors_give_the_definition(depth: int, bits: int) -> None:
    x = unequal_inputs(30, depth).bfloat16()
    weight = pack(random(200, depth), bits, factors_for(x.float().square().mean(0).sqrt()))
    for num_rows in (1, 2, 5, 30):
        assert_agrees(x[:num_rows], weight, random(200))


@pytest.mark.parametrize("num_rows", [1, 5, 30])
def test_groups_of_8_bits_give_the_definition_and_are_nearer_to_the_weights(num_rows: int) -> None:
    x, weight = random(num_rows, 576), random(200, 576)
    whole, groups = pack(weight, 8), pack(weight, 8, group_of_8_bits=64)
    assert_agrees(x, groups)
    errors = [(packed.unpack() - weight.float()).norm() for packed in (whole, groups)]
    assert errors[1] < 0.85 * errors[0]


@pytest.mark.parametrize(("bits", "most"), [(8, 0.5), (4, 0.9)])
def test_factors_for_unequal_inputs_bring_the_product_nearer(bits: int, most: float) -> None:
    x, weight = unequal_inputs(20, 576), random(300, 576, dtype=torch.float32)
    right, factors = x @ weight.T, factors_for(x.square().mean(0).sqrt())
    plain, scaled = (packed_linear(x, packed) - right for packed in (pack(weight, bits), pack(weight, bits, factors)))
    assert scaled.norm() < most * plain.norm()


@rounded
def test_weights_with_factors_unpack_to_what_was_packed(bits: int) -> None:
    weight, factors = random(200, 96, dtype=torch.float32), factors_for(unequal_inputs(9, 96).square().mean(0).sqrt())
    error = pack(weight, bits, factors).unpack() - weight
    assert error.norm() < {8: 0.02, 4: 0.2}[bits] * weight.norm()


def test_factors_of_inputs_that_are_never_there_are_finite() -> None:
    assert factors_for(torch.tensor([0.0, 1.0, 2.0])).isfinite().all()


@rounded
def test_weights_are_merged_only_if_they_have_the_same_factors(bits: int) -> None:
    ones, twos = (torch.full((64,), factor) for factor in (1.0, 2.0))
    one, other, plain = (pack(random(64, 64), bits, factors) for factors in (ones, twos, None))
    assert can_be_merged([one, pack(random(80, 64), bits, ones.clone())])
    assert not can_be_merged([one, other])
    assert not can_be_merged([one, plain])
    assert not can_be_merged([plain, one])


@rounded
def test_merged_weights_keep_their_factors(bits: int) -> None:
    x, factors = random(5, 64), torch.rand(64) + 0.5
    parts = [pack(random(n, 64), bits, factors) for n in (80, 64)]
    expected = [packed_linear(x, part) for part in parts]
    merged = merge(parts)
    assert torch.equal(packed_linear(x, merged), torch.cat(expected, dim=1))
    for part, right in zip(split(merged, [80, 64]), expected, strict=True):
        assert torch.equal(packed_linear(x, part), right)


@each_size
@pytest.mark.parametrize("num_columns", [96, 1101])
def test_a_row_gets_the_same_bits_whatever_its_batch_mates(num_columns: int, bits: int) -> None:
    x, weight, bias = random(600, 576), pack(random(num_columns, 576), bits), random(num_columns)
    together = packed_linear(x, weight, bias)
    for num_rows in (*range(1, 14), 64, 300):
        assert torch.equal(packed_linear(x[:num_rows], weight, bias), together[:num_rows])
    assert torch.equal(packed_linear(x[599:], weight, bias), together[599:])


@each_size
@pytest.mark.parametrize("num_rows", [1, 8, 150])
def test_the_number_of_threads_changes_nothing(num_rows: int, bits: int) -> None:
    x, weight = random(num_rows, 576), pack(random(1963, 576), bits)
    before = torch.get_num_threads()
    results = []
    try:
        for num_threads in (1, 2, 7):
            torch.set_num_threads(num_threads)
            results.append(packed_linear(x, weight))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@each_size
def test_rows_may_be_a_view(bits: int) -> None:
    weight, merged = pack(random(24, 64), bits), random(90, 200)
    for x in (merged[:, 10:74], merged[::3, 1:65], merged[:64, :9].T, merged[:1, :64]):
        assert torch.equal(packed_linear(x, weight), packed_linear(x.contiguous(), weight))


@each_size
def test_merged_weights_give_the_columns_of_each_and_can_be_split_again(bits: int) -> None:
    x, parts = random(5, 64), [pack(random(n, 64), bits) for n in (80, 64, 37)]
    expected = [packed_linear(x, part) for part in parts]
    merged = merge(parts[:2])
    assert torch.equal(packed_linear(x, merged), torch.cat(expected[:2], dim=1))
    for part, right in zip(split(merged, [80, 64]), expected, strict=False):
        assert torch.equal(packed_linear(x, part), right)
        assert part.values.untyped_storage().data_ptr() == merged.values.untyped_storage().data_ptr()


@each_size
def test_what_is_empty_stays_empty(bits: int) -> None:
    assert packed_linear(random(0, 64), pack(random(5, 64), bits)).shape == (0, 5)


@each_size
def test_what_is_not_finite_stays_in_its_row(bits: int) -> None:
    x, weight = random(9, 70), pack(random(40, 70), bits)
    expected = packed_linear(x, weight)
    x[4, 69], x[6, 2] = math.nan, math.inf
    y = packed_linear(x, weight)
    assert not y[[4, 6]].isfinite().any()
    others = [row for row in range(9) if row not in (4, 6)]
    assert torch.equal(y[others], expected[others])


@each_size
def test_zeros_give_zeros(bits: int) -> None:
    assert not packed_linear(torch.zeros(3, 64).bfloat16(), pack(random(24, 64), bits)).any()
    assert not packed_linear(random(3, 64), pack(torch.zeros(24, 64).bfloat16(), bits)).any()


@pytest.mark.parametrize(("bits", "size"), [(16, 2), (8, 1.01), (4, 0.57)])
def test_weights_take_two_bytes_or_one_or_little_more_than_half(bits: int, size: float) -> None:
    weight = pack(random(960, 576), bits)
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in (weight.values, weight.scales))
    assert num_bytes <= size * 960 * 576


OTHER_CPU = """
import sys, torch
from paged_kernels import pack, packed_linear, reference, vector
assert not vector.DOTS_QUADS and not vector.DOTS_BFLOAT16 and vector.WIDTH == int(sys.argv[1])
generator = torch.Generator().manual_seed(0)
weight = torch.randn(200, 576, generator=generator).bfloat16()
for bits in (16, 8, 4):
    packed = pack(weight, bits)
    for num_rows in (1, 2, 3, 7, 70):
        x = torch.randn(num_rows, 576, generator=generator).bfloat16()
        actual, expected = packed_linear(x, packed).float(), reference.packed_linear(x, packed).float()
        assert (actual - expected).norm() <= 1e-3 * expected.norm(), (bits, num_rows)
"""


OLD = "+sse,+sse2,+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+cmov,+cx8"


@pytest.mark.slow
@pytest.mark.timeout(300)  # it compiles
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="names a CPU of another kind")
@pytest.mark.parametrize(
    ("cpu", "features", "width"),
    [("haswell", OLD + ",+avx,+avx2,+fma,+f16c,+bmi,+bmi2", 8), ("nehalem", OLD, 4)],
)
def test_cpus_without_instructions_for_it_compute_the_same(tmp_path: Path, cpu: str, features: str, width: int) -> None:
    environment = {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features, "NUMBA_CACHE_DIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", OTHER_CPU, str(width)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stderr


# --- weights that were rounded elsewhere ---


def random_numbers(num_columns: int, depth: int, group: int, bits: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(depth + group)
    most = 1 << (bits - 1)
    numbers = torch.randint(-most, most, (num_columns, depth), generator=generator, dtype=torch.int8)
    return numbers, (torch.rand(num_columns, depth // group, generator=generator) + 0.1).half()


@rounded
@pytest.mark.parametrize("group", [16, 32, 128, 384])
def test_given_numbers_are_kept_as_they_are(group: int, bits: int) -> None:
    numbers, scales = random_numbers(200, 384, group, bits)
    weight = pack_numbers(numbers, scales, bits)
    right = numbers * scales.float().repeat_interleave(group, dim=1)
    assert torch.equal(weight.unpack(), right)
    for num_rows in (1, 2, 7, 70):
        x = random(num_rows, 384)
        assert_agrees(x, weight, random(200))
        error = packed_linear(x.float(), weight) - x.float() @ right.T
        assert error.norm() < 0.01 * (x.float() @ right.T).norm()


@rounded
def test_given_numbers_survive_merging_and_are_not_merged_with_others(bits: int) -> None:
    parts = [pack_numbers(*random_numbers(size, 64, 32, bits), bits) for size in (64, 80)]
    merged = merge(parts)
    x = random(3, 64)
    assert torch.equal(packed_linear(x, merged), torch.cat([packed_linear(x, part) for part in parts], dim=1))
    for part, again in zip(parts, split(merged, [64, 80]), strict=True):
        assert torch.equal(part.unpack(), again.unpack())
    assert not can_be_merged([parts[0], pack(random(64, 64), bits)])
