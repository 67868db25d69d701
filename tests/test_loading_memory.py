"""Loading holds the weights once, and little else."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers_models import make_model
from paged_backend import demo_folder

CODE = """if True:
    import sys
    from paged_backend import LLM
    llm = LLM(sys.argv[1], dtype="bfloat16", kv_cache_memory="16MiB", max_num_seqs=1, max_model_len=256)
    lines = open("/proc/self/status").read().splitlines()
    print(next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024)
"""


def peak_of_loading(folder: Path) -> int:
    """The most memory, in bytes, that a process ever had which loads a model and does nothing else."""
    process = subprocess.run(
        [sys.executable, "-c", CODE, str(folder)], capture_output=True, text=True, timeout=300, check=True
    )
    return int(process.stdout)


def size_of_weights(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_takes_little_more_than_the_weights(tmp_path: Path) -> None:
    """Compared with a model of next to no weights, with the same tokenizer and on the same code."""
    demo = demo_folder()
    shutil.copytree(demo, tmp_path / "tiny", ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    tiny = make_model("llama", vocab_size=49152, tie_word_embeddings=True, initializer_range=0.02).to(torch.bfloat16)
    tiny.save_pretrained(tmp_path / "tiny")
    peak_of_loading(tmp_path / "tiny")  # compiles the kernels, if this is the first time
    weights = size_of_weights(demo) - size_of_weights(tmp_path / "tiny")
    assert peak_of_loading(demo) - peak_of_loading(tmp_path / "tiny") <= 1.3 * weights
