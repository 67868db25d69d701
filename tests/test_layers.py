"""Dependencies point one way: adapters and servers -> paged_backend's public names -> its parts -> paged_kernels."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import paged_backend

ROOT = Path(__file__).parents[1]
SOURCE_FOLDERS = (ROOT / "kernels", ROOT / "integrations", ROOT)  # a package is looked for in the first that has it

ADAPTERS = ("langchain_paged", "llama_index.llms.paged", "llama_index.embeddings.paged", "transformers_paged")
FRAMEWORKS = ("langchain", "langchain_core", "langchain_community", "langgraph", "llama_index")
WEB = (
    *("fastapi", "starlette", "uvicorn", "httpx", "openai", "prometheus_client", "typer", "rich", "yaml"),
    *("opentelemetry", "matplotlib"),
)
SERVING = ("paged_backend.server", "paged_backend.cli")


@dataclass(frozen=True)
class Rule:
    """`package` and what is below it never import `forbidden` or what is below that, but for `allowed`.

    An import under `if TYPE_CHECKING:` counts only where `types_too` says so. One inside a function counts.
    """

    package: str
    forbidden: tuple[str, ...]
    allowed: tuple[str, ...] = ()
    unless_in: tuple[str, ...] = ()
    types_too: bool = True


def is_of_same_framework(adapter: str, other: str) -> bool:
    return adapter.partition(".")[0] == other.partition(".")[0]


# What every part of paged_backend may know: settings, results, errors.
SHARED = tuple(
    f"paged_backend.{name}"
    for name in (
        *("beam_search_params", "config", "errors", "fields", "histogram", "logits_processors", "lora", "outputs"),
        *("pooling_params", "sampling_params", "structured_outputs"),
    )
)
# What a step's executors are handed.
STEP = ("paged_backend.engine.request", "paged_backend.engine.scheduler")
# Which layers share block tables, and what sequences take then.
LAYOUT = "paged_backend.engine.kv_layout"

RULES = (
    Rule("paged_kernels", forbidden=("paged_backend", "transformers", *ADAPTERS, *FRAMEWORKS, *WEB)),
    Rule("paged_backend", forbidden=(*ADAPTERS, *FRAMEWORKS)),
    Rule("paged_backend", forbidden=(*WEB, *SERVING), unless_in=SERVING),
    Rule(
        "paged_backend.engine",
        forbidden=("torch", "transformers", "numba", "paged_kernels", "paged_backend"),
        allowed=("paged_backend.engine", *SHARED),
        types_too=False,
    ),
    Rule(
        "paged_backend.model",
        forbidden=("paged_backend",),
        allowed=("paged_backend.model", *SHARED, *STEP, LAYOUT),
        unless_in=("paged_backend.model.self_check",),
    ),
    Rule(  # drives a real scheduler over its probe
        "paged_backend.model.self_check",
        forbidden=("paged_backend",),
        allowed=("paged_backend.model", *SHARED, *STEP, LAYOUT, "paged_backend.engine.kv_cache_manager"),
    ),
    Rule(
        "paged_backend.sampling",
        forbidden=("transformers", "paged_backend"),
        allowed=("paged_backend.sampling", *SHARED, *STEP),
    ),
    Rule(
        "paged_backend.chat",
        forbidden=("paged_kernels", "paged_backend"),
        allowed=("paged_backend.chat", *SHARED, "paged_backend.engine.output_processor.TextDecoder"),
    ),
    *(
        Rule(adapter, forbidden=tuple(a for a in ADAPTERS if not is_of_same_framework(a, adapter)))
        for adapter in ADAPTERS
    ),
)

# These see of paged_backend what any user sees: the names that it exports, from wherever they are imported.
PUBLIC_NAMES_ONLY = (*ADAPTERS, *SERVING)


@dataclass(frozen=True)
class Import:
    """One imported name: `from a.b import c` is `a.b.c`, `import a.b` is `a.b`."""

    module: str
    line: int
    name: str
    for_types_only: bool


def is_within(name: str, packages: Collection[str]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def imports_of(module: str, source: str) -> Iterator[Import]:
    """Every import of an absolute name in a module, wherever in it; relative ones are an error (none are used)."""
    tree = ast.parse(source)
    guarded = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and ast.unparse(branch.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for statement in branch.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (Import(module, node.lineno, name, id(node) in guarded) for name in names)


def sources_of(package: str) -> Iterator[tuple[str, str]]:
    """Name and text of each module in a package that the repository has; nothing for one that it has not."""
    relative = package.replace(".", "/")
    for base in SOURCE_FOLDERS:
        for path in sorted([*base.glob(f"{relative}.py"), *base.glob(f"{relative}/**/*.py")]):
            parts = path.relative_to(base).with_suffix("").parts
            yield ".".join(parts).removesuffix(".__init__"), path.read_text()


def breaks(rule: Rule, found: Import) -> bool:
    return (
        is_within(found.module, [rule.package])
        and not is_within(found.module, rule.unless_in)
        and is_within(found.name, rule.forbidden)
        and not is_within(found.name, rule.allowed)
        and (rule.types_too or not found.for_types_only)
    )


def is_private(found: Import, public_names: Collection[str]) -> bool:
    """Whether this is a name of paged_backend that only paged_backend itself should know."""
    own = next((package for package in PUBLIC_NAMES_ONLY if is_within(found.module, [package])), None)
    family = SERVING if own in SERVING else (own,)  # the command line starts the server
    if own is None or not is_within(found.name, ["paged_backend"]) or is_within(found.name, family):
        return False
    return found.name != "paged_backend" and found.name.rpartition(".")[2] not in public_names


def violations(module: str, source: str, public_names: Collection[str] = paged_backend.__all__) -> list[str]:
    return [
        f"{found.module}:{found.line} imports {found.name}"
        for found in imports_of(module, source)
        if is_private(found, public_names) or any(breaks(rule, found) for rule in RULES)
    ]


@pytest.mark.parametrize("package", ["paged_kernels", "paged_backend", *ADAPTERS])
def test_imports_point_one_way(package: str) -> None:
    found = [line for module, source in sources_of(package) for line in violations(module, source)]
    assert found == []


def test_engine_loads_without_torch() -> None:
    """What the rules cannot see: an allowed module that itself imports torch."""
    modules = [module for module, _ in sources_of("paged_backend.engine")]
    assert modules != []
    code = f"import sys, {', '.join(modules)}; print(*{{'torch', 'transformers', 'numba'}} & set(sys.modules))"
    completed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (completed.stdout.strip(), completed.returncode) == ("", 0), completed.stderr


def test_kernels_load_without_their_compiler() -> None:
    code = "import sys, paged_kernels; print('numba' in sys.modules)"
    completed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert completed.stdout.strip() == "False", completed.stderr


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("paged_kernels.cpu", "from paged_backend.errors import EngineError"),
        ("paged_backend.llm", "import langchain_core.messages"),
        ("paged_backend.llm", "from llama_index.core import Settings"),
        ("paged_backend.llm", "def f():\n    import langchain_paged"),
        ("paged_backend.llm", "import fastapi"),
        ("paged_backend.engine.scheduler", "import torch"),
        ("paged_backend.engine.scheduler", "import torch.nn as nn"),
        ("paged_backend.engine.engine", "from paged_backend.model.runner import ModelRunner"),
        ("paged_backend.engine.engine", "from paged_backend.model import runner"),
        ("paged_backend.engine.engine", "from paged_backend import sampling"),
        ("paged_backend.model.runner", "from paged_backend.engine.block_pool import BlockPool"),
        ("paged_backend.sampling.sampler", "from paged_backend.model import runner"),
        ("paged_backend.chat.template", "from paged_backend.llm import LLM"),
        ("langchain_paged.chat_models", "from paged_backend.engine.loop import EngineLoop"),
        ("langchain_paged.chat_models", "import paged_backend.engine.loop"),
        ("langchain_paged.chat_models", "from paged_backend import engine"),
        ("langchain_paged.chat_models", "from llama_index.llms.paged import Paged"),
        ("llama_index.llms.paged.base", "from langchain_paged import ChatPaged"),
        ("paged_backend.server.app", "from paged_backend.llm import _render"),
        ("paged_backend.cli", "import transformers_paged"),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str) -> None:
    assert len(violations(module, source, public_names={"LLM"})) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("paged_backend.engine.scheduler", "import numpy as np"),
        ("paged_backend.engine.engine", "if TYPE_CHECKING:\n    from paged_backend.model.runner import ModelRunner"),
        ("paged_backend.model.runner", "from paged_backend.engine.request import Sequence"),
        ("paged_backend.model.runner", "import torch, paged_kernels"),
        ("paged_backend.server.app", "import fastapi"),
        ("paged_backend.server.app", "from paged_backend.server.routes import router"),
        ("paged_backend.cli.serve", "from paged_backend.server.lifecycle import run"),
        ("langchain_paged.chat_models", "import paged_backend"),
        ("llama_index.embeddings.paged.base", "from llama_index.llms.paged.engine_user import EngineUser"),
        ("langchain_paged.chat_models", "from paged_backend import LLM"),
        ("langchain_paged.chat_models", "from paged_backend.llm import LLM"),
        ("langchain_paged.chat_models", "from langchain_paged.messages import to_openai"),
    ],
)
def test_a_right_import_is_not(module: str, source: str) -> None:
    assert violations(module, source, public_names={"LLM"}) == []
