"""What an installation makes importable, and that the repository's folders get in nobody's way."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
PACKAGES = set(SETUPTOOLS["packages"])

# Folders whose name would shadow somebody else's package if they ever became one. An importable `kernels` breaks
# `import transformers`; `llama_index` and what is below it are shared with LlamaIndex's own distributions.
NEVER_A_PACKAGE = (
    "kernels",
    "integrations",
    "integrations/llama_index",
    "integrations/llama_index/llms",
    "integrations/llama_index/embeddings",
    "tests",
    "examples",
    "benchmarks",
    "docs",
)
NEVER_IMPORTABLE = ("kernels", "integrations", "tests", "examples", "benchmarks", "docs")


def folder_of_package(name: str) -> Path:
    """The folder that package-dir gives to a package: its own entry's, or its parent's with the last part added."""
    mapped: str | None = SETUPTOOLS["package-dir"].get(name)
    if mapped:
        return ROOT / mapped
    parent, _, last = name.rpartition(".")
    return folder_of_package(parent) / last if parent else ROOT / last


def source_files() -> Iterator[tuple[str, Path]]:
    """Each Python file that belongs in an installation, with the path it is to have there."""
    bases = [(ROOT, "paged_backend/**/*.py"), (ROOT / "kernels", "**/*.py"), (ROOT / "integrations", "**/*.py")]
    for base, pattern in bases:
        for path in base.glob(pattern):
            yield path.relative_to(base).as_posix(), path


def page_files() -> Iterator[str]:
    """The server's page, which has no Python in it."""
    for path in (ROOT / "paged_backend/server/static").iterdir():
        yield path.relative_to(ROOT).as_posix()


def run_python(code: str, *, python: Path | str = sys.executable, cwd: Path, path: Path | None = None) -> str:
    """What `python -c code` prints in `cwd`, with nothing but `path` in PYTHONPATH; fails with its stderr."""
    environment = {**os.environ, "PYTHONPATH": str(path or "")}
    completed = subprocess.run(
        [python, "-c", textwrap.dedent(code)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=100
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout.strip()


def test_setuptools_lists_every_package_of_the_tree() -> None:
    packages = {Path(installed).parent.as_posix().replace("/", ".") for installed, _ in source_files()}
    assert packages == PACKAGES


def test_package_dir_leads_to_the_package() -> None:
    assert [name for name in sorted(PACKAGES) if not (folder_of_package(name) / "__init__.py").is_file()] == []


def test_every_package_says_that_it_is_typed() -> None:
    topmost = {name for name in PACKAGES if name.rpartition(".")[0] not in PACKAGES}
    assert [name for name in sorted(topmost) if not (folder_of_package(name) / "py.typed").is_file()] == []
    assert [name for name in sorted(topmost) if "py.typed" not in SETUPTOOLS["package-data"].get(name, [])] == []


@pytest.mark.parametrize("folder", NEVER_A_PACKAGE)
def test_plain_folders_stay_plain(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()


def test_importing_paged_backend_is_quick_and_loads_no_framework() -> None:
    code = """
        import sys, time
        start = time.perf_counter()
        import paged_backend
        seconds = time.perf_counter() - start
        print(seconds, *({"torch", "transformers", "numba"} & set(sys.modules)))
    """
    runs = [run_python(code, cwd=ROOT).split() for _ in range(5)]
    assert {name for run in runs for name in run[1:]} == set()
    assert min(float(run[0]) for run in runs) < 0.1


def stub_of_hf_kernels(folder: Path) -> Path:
    """A `kernels` distribution that transformers takes for Hugging Face's: its version, and every name asked for."""
    spec = find_spec("transformers")
    assert spec is not None and spec.origin is not None
    source = (Path(spec.origin).parent / "utils/import_utils.py").read_text()
    version = re.search(r'^KERNELS_MIN_VERSION = "(.+)"$', source, re.MULTILINE)
    assert version is not None
    metadata = folder / f"kernels-{version[1]}.dist-info" / "METADATA"
    module = folder / "kernels" / "__init__.py"
    metadata.parent.mkdir(parents=True)
    module.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {version[1]}\n")
    module.write_text(
        textwrap.dedent("""
            class Stub:
                def __init__(self, *args, **kwargs): pass
                def __call__(self, decorated): return decorated

            def __getattr__(name):
                if name.startswith("__"): raise AttributeError(name)
                return Stub
        """)
    )
    return folder


@pytest.mark.parametrize("hf_kernels_installed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_transformers_imports_from_the_repository_root(hf_kernels_installed: bool, tmp_path: Path) -> None:
    code = """
        from transformers import LlamaForCausalLM
        from transformers.utils import is_kernels_available
        print(is_kernels_available())
    """
    path = stub_of_hf_kernels(tmp_path) if hf_kernels_installed else None
    assert run_python(code, cwd=ROOT, path=path) == str(hf_kernels_installed)


@pytest.fixture(scope="module")
def source_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy to build from, so that the builds leave nothing in the repository."""
    tree = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in ("paged_backend", *NEVER_IMPORTABLE):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tree


@pytest.fixture(scope="module")
def wheel(source_tree: Path) -> Path:
    """Built from the sdist, so that what the sdist lacks the wheel lacks too."""
    subprocess.run([sys.executable, "-m", "build", "--no-isolation"], cwd=source_tree, check=True, timeout=100)
    return next((source_tree / "dist").glob("*.whl"))


@pytest.fixture(scope="module")
def editable_wheel(source_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the build backend hands to any pip that was asked for an editable install."""
    code = "import sys, setuptools.build_meta as backend; print(backend.build_editable(sys.argv[1]))"
    folder = tmp_path_factory.mktemp("editable")
    subprocess.run([sys.executable, "-c", code, folder], cwd=source_tree, check=True, timeout=100)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module", params=["wheel", "editable_wheel"])
def python_with_install(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment's interpreter, beside the pip that came with it, that has our distribution and no other."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    install = [python, "-m", "pip", "install", "--no-deps", "--no-index", request.getfixturevalue(request.param)]
    subprocess.run(install, check=True, timeout=100)
    return python


@pytest.mark.slow
def test_wheel_has_every_source_file_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    metadata = {name for name in names if name.partition("/")[0].endswith(".dist-info")}
    typed = {name for name in names if name.endswith("/py.typed")}
    assert set(names) - metadata - typed == {*(installed for installed, _ in source_files()), *page_files()}
    assert [name for name in metadata if name.endswith("/licenses/LICENSE")] != []


@pytest.mark.slow
def test_an_installation_adds_our_packages_and_no_other_name(python_with_install: Path, tmp_path: Path) -> None:
    code = f"""
        from importlib.metadata import distribution
        from importlib.util import find_spec
        print(*distribution("paged-backend").read_text("top_level.txt").split())
        print(*(name for name in {[*PACKAGES, *NEVER_IMPORTABLE]} if find_spec(name)))
    """
    top_level, importable = run_python(code, python=python_with_install, cwd=tmp_path).splitlines()
    assert set(top_level.split()) == {name.partition(".")[0] for name in PACKAGES}
    assert set(importable.split()) == PACKAGES
