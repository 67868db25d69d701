"""Loading holds the weights once, and little else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from paged_backend import demo_folder

IMPORTS = """
import numba, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
"""
LOADING = """
import sys
from paged_backend import LLM
llm = LLM(sys.argv[1], dtype="bfloat16", kv_cache_memory="16MiB", max_num_seqs=1, max_model_len=256)
"""
PEAK = """
lines = open("/proc/self/status").read().splitlines()
print(next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024)
"""


def peak_of(code: str, *args: str) -> int:
    """The most memory, in bytes, that a process ever had which runs the code and does nothing else."""
    process = subprocess.run(
        [sys.executable, "-c", code + PEAK, *args], capture_output=True, text=True, timeout=300, check=True
    )
    return int(process.stdout)


def size_of_weights(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@pytest.fixture(scope="module")
def imported() -> int:
    peak_of(LOADING, str(demo_folder()))  # compiles the kernels, if this is the first time
    return peak_of(IMPORTS)


def in_parts(folder: Path) -> Path:
    """The demo model in files of a fifth of it."""
    model = AutoModelForCausalLM.from_pretrained(demo_folder(), dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size=f"{size_of_weights(demo_folder()) // 5_000_000}MB")
    assert len(list(folder.glob("*.safetensors"))) >= 4
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("is_whole", [True, False])
def test_loading_takes_little_more_than_the_weights(is_whole: bool, imported: int, tmp_path: Path) -> None:
    """Beyond what importing the libraries takes: the tokenizer, kernels and what the check at load needs are in it. Of
    a model in parts, none is held twice."""
    folder = demo_folder() if is_whole else in_parts(tmp_path)
    peak = min(peak_of(LOADING, str(folder)) for _ in range(3))  # some pages more or less stay with the heap
    assert peak - imported <= 1.35 * size_of_weights(demo_folder())  # 1.28 where it was measured
