"""vLLM's HTTP server in the environment that `vllm_peer.py` gives its engine: `vllm_server.py THREADS OPTION...`"""

from __future__ import annotations

import os
import sys

from vllm_peer import LENGTHS, environment


def main() -> None:
    threads, *options = sys.argv[1:]
    os.environ |= environment(int(threads))
    lengths = [part for name, value in LENGTHS.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *lengths, *options]
    os.execv(sys.executable, server)  # LD_PRELOAD is for a program that begins


if __name__ == "__main__":
    main()
