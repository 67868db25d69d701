"""Which architectures run in shards, on two ranks: `python tests/models/shards.py [ARCHITECTURE ...]`.

With paged_backend and tests on the path. Takes ten seconds for each that transformers has a plan for.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers_architectures import ARCHITECTURES, make_tiny
from paged_backend import check_model


def outcome(architecture: str) -> str:
    try:
        with tempfile.TemporaryDirectory() as folder:
            make_tiny(architecture).save_pretrained(folder)
            settings = {"device": "cpu", "dtype": "float32", "num_gpu_blocks_override": 64}
            verdict = check_model(folder, tensor_parallel_size=2, **settings)
    except Exception as error:  # whatever a model's code raises
        return f"no: {error}".splitlines()[0]
    return f"yes, {verdict.bytes_per_token} bytes per token in each rank"


if __name__ == "__main__":
    for name in sys.argv[1:] or ARCHITECTURES:
        sys.stdout.write(f"{name}: {outcome(name)}\n")
