"""How Triton kernels are launched on which device."""

import pytest
import torch

from paged_kernels.triton_configs import AttentionConfig, attention_config, check_cache_dtype
from paged_kernels.triton_device import architecture_of

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "gfx942", "gfx950")


@pytest.mark.parametrize(
    ("backend", "arch", "row"),
    [
        ("cuda", 80, "sm_80"),
        ("cuda", 86, "sm_86"),
        ("cuda", 89, "sm_89"),
        ("cuda", 90, "sm_90"),
        ("cuda", 103, "sm_100"),
        ("cuda", 120, "sm_89"),
        ("hip", "gfx90a", "gfx942"),
        ("hip", "gfx950", "gfx950"),
    ],
)
def test_every_device_has_a_row_of_the_tables(backend, arch, row):
    assert architecture_of(backend, arch) == row


def test_a_device_that_is_too_old_is_refused():
    with pytest.raises(RuntimeError, match=r"capability 8.0 or later, this one has 7.5"):
        architecture_of("cuda", 75)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("cache_dtype", [None, torch.int8], ids=str)
def test_tiles_fit_the_rows_that_there_are(architecture, dtype, cache_dtype):
    for head_size in (32, 80, 128, 192, 256, 576):
        for num_rows in (0.5, 1, 16, 17, 40, 5000):
            if head_size == 576 and dtype == torch.float32 and architecture in ("sm_86", "sm_89", "gfx942"):
                continue  # which is refused
            config = attention_config(architecture, head_size, num_rows, dtype, cache_dtype or dtype)
            assert 16 <= config.rows < max(32, 2 * num_rows)
            assert config.keys >= 16
            assert config.keys_per_split % config.keys == 0


def test_heads_that_are_too_large_are_refused():
    with pytest.raises(ValueError, match="head size of 600 is above 576"):
        attention_config("sm_90", 600, 1, torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize("architecture", ["sm_86", "sm_89", "gfx942"])
def test_latents_in_float32_that_do_not_fit_are_refused(architecture):
    with pytest.raises(ValueError, match="too little shared memory for heads of 576 float32; use dtype='bfloat16'"):
        attention_config(architecture, 576, 1, torch.float32, torch.float32)


def test_a_type_that_the_device_lacks_is_refused():
    check_cache_dtype("sm_89", torch.float8_e4m3fn)
    check_cache_dtype("sm_86", torch.float8_e5m2)
    with pytest.raises(ValueError, match="use float8_e5m2 or int8"):
        check_cache_dtype("sm_86", torch.float8_e4m3fn)


def test_keys_are_split_until_all_processors_are_busy():
    decode, prefill = AttentionConfig(16, 64, 4, 3), AttentionConfig(128, 64, 8, 3)
    assert decode.num_splits(num_programs=8, max_keys=100_000, num_processors=132) == 64
    assert decode.num_splits(num_programs=8, max_keys=1000, num_processors=132) == 4  # 256 keys each
    assert decode.num_splits(num_programs=256, max_keys=100_000, num_processors=132) == 8
    assert decode.num_splits(num_programs=5000, max_keys=100_000, num_processors=132) == 1
    assert prefill.num_splits(num_programs=40, max_keys=100_000, num_processors=132) == 4
    assert prefill.num_splits(num_programs=132, max_keys=100_000, num_processors=132) == 1
