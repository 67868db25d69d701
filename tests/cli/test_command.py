"""What all commands share: help, versions, errors, exit codes."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

import paged_backend
from helpers_cli import ROOT, Fakes, failed, run
from paged_backend import ConfigError, EngineConfig
from paged_backend.cli.options import ENGINE_OPTIONS

SLOW_TO_IMPORT = ("torch", "transformers", "numba", "fastapi", "uvicorn", "numpy")
CALL = "from paged_backend.cli import main; main()"
COMMANDS = ("serve", "chat", "generate", "run-batch", "check", "bench", "demo")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_every_option_in_full(command: str) -> None:
    result = run(command, "--help", columns=60)
    assert result.exit_code == 0
    for name in ENGINE_OPTIONS:
        assert f"--{name.replace('_', '-')}" in result.output
    assert "--config" in result.output and "\nEngine:\n" in result.output


def test_every_setting_of_the_engine_that_does_something_is_an_option() -> None:
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    assert set(ENGINE_OPTIONS) - {"tokenizer"} == fields


def test_the_version_is_told() -> None:
    assert run("--version").output.strip() == paged_backend.__version__


def test_help_and_wrong_usage_wait_for_no_import() -> None:
    script = f"""
import sys
from paged_backend.cli import main

codes = []
for arguments in [("--help",), ("--version",), *((command, "--help") for command in {COMMANDS}), ("serve", "--prot")]:
    sys.argv[1:] = arguments
    try:
        main()
    except SystemExit as end:
        codes.append(end.code)
print(codes, [name for name in {SLOW_TO_IMPORT} if name in sys.modules])
"""
    completed = in_own_process(script)
    assert completed.stdout.splitlines()[-1] == f"{[0] * (2 + len(COMMANDS)) + [2]} []", completed.stderr


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("typer", ("serve", "m")),
        ("fastapi", ("serve", "m")),
        ("fastapi", ("run-batch", "-i", "in", "-o", "out", "--model", "m")),
    ],
)
def test_without_the_extra_it_says_how_to_install_it(tmp_path: Path, module: str, arguments: tuple[str, ...]) -> None:
    (tmp_path / f"{module}.py").write_text(f"raise ModuleNotFoundError('no {module}', name='{module}')")
    completed = in_own_process(f"import sys\nsys.argv[1:] = {arguments!r}\n{CALL}", tmp_path)
    assert completed.returncode == 1
    assert "pip install 'paged-backend[server]'" in completed.stderr and "Traceback" not in completed.stderr


def test_an_interrupt_during_the_imports_has_its_code_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt")
    completed = in_own_process(CALL, tmp_path)
    assert completed.returncode == 130 and completed.stderr == ""


def test_an_interrupt_ends_a_command_whatever_else_runs(tmp_path: Path) -> None:
    """As libraries abort that are taken away from threads which load a model."""
    script = """
import atexit, os
from paged_backend.cli import app as module, main

def command():
    print("half a line", end="")
    raise SystemExit(130)

atexit.register(os.abort)
module.app = command
main()
"""
    completed = in_own_process(script)
    assert (completed.returncode, completed.stdout) == (130, "half a line")


@pytest.mark.parametrize(
    ("content", "complaint"), [("prot: 9", "did you mean 'port'"), ("[1]", "must map"), ("a: [", "cannot be read")]
)
def test_a_bad_file_of_options_is_wrong_usage(tmp_path: Path, content: str, complaint: str) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(content)
    assert complaint in failed(run("serve", "m", "--config", str(config)), 2)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("serve", "m", "--block-size", "0"), "block_size=0 is out of range"),
        (("serve", "m", "--log-level", "loud"), "log_level='loud'"),
        (("serve", "m", "--api-key-file", "/no/such/file"), "/no/such/file"),
        (("run-batch", "-i", "/no/such/file", "-o", "/tmp/x", "--model", "m"), "/no/such/file"),
        (("generate", "m", "-i", "/no/such/file", "-o", "/no/such/output"), "/no/such/file"),
    ],
)
def test_an_error_is_one_sentence(fakes: Fakes, arguments: tuple[str, ...], complaint: str) -> None:
    output = failed(run(*arguments))
    assert complaint in output and len(output.strip().splitlines()) == 1
    assert isinstance(run(*arguments, "--debug").exception, (ConfigError, OSError))


@pytest.mark.parametrize(
    "arguments", ["serve", "serve m --prot 9", "sreve", "serve m --port x", "serve m --speculative-config x"]
)
def test_wrong_usage_has_a_code_of_its_own(arguments: str) -> None:
    failed(run(*arguments.split()), 2)


def in_own_process(script: str, *before: Path) -> subprocess.CompletedProcess[str]:
    """What is in the folders `before` is found before what is installed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*before, ROOT)))}
    command = [sys.executable, "-c", script]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
