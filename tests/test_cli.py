"""The command line: options, files of them, errors, and jobs over files that lose nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import inspect
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

import paged_backend
from helpers import wait_until
from helpers_server import CHAT_TEMPLATE, END, ScriptedSampler, make_scripted_llm
from paged_backend import LLM, ConfigError, EngineConfig, EngineDeadError
from paged_backend.cli import chat as chat_module
from paged_backend.cli import generate as generate_module
from paged_backend.cli import run_batch as run_batch_module
from paged_backend.cli import serve as serve_module
from paged_backend.cli.app import app
from paged_backend.cli.jsonl import JsonLines
from paged_backend.cli.options import ENGINE_OPTIONS
from paged_backend.cli.progress import as_they_finish
from paged_backend.engine.scheduler import SchedulerOutput
from paged_backend.server.models import Models

ROOT = Path(__file__).parents[1]
COMMANDS = ("serve", "chat", "generate", "run-batch", "check", "bench", "demo")


def run(*arguments: str, text: str | None = None, columns: int = 200) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)], input=text, env={"COLUMNS": str(columns)})


def failed(result: Result, code: int = 1) -> str:
    """What a failing command says: one line, without a traceback."""
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result.output


@dataclasses.dataclass
class Fakes:
    """What the commands load instead of models."""

    made: list[tuple[str, dict[str, Any]]]
    script: list[int]
    template: str = CHAT_TEMPLATE
    on_step: Callable[[SchedulerOutput], object] = lambda output: None
    sampler: ScriptedSampler | None = None

    def make(self, model: str, tokenizer: str | None = None, **config: Any) -> LLM:
        self.made.append((model, config))
        llm, runner, self.sampler = make_scripted_llm(template=self.template, **config)
        self.sampler.script, runner.on_step = self.script, self.on_step
        return llm


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    fakes = Fakes([], [*b"abcdefgh", END])
    for module in (chat_module, generate_module, run_batch_module, serve_module):
        monkeypatch.setattr(module, "LLM", fakes.make)
    return fakes


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


def test_without_the_extra_it_says_how_to_install_it(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError('no typer', name='typer')")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-c", "from paged_backend.cli import main; main()"]
    completed = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert completed.returncode == 1
    assert "pip install 'paged-backend[server]'" in completed.stderr and "Traceback" not in completed.stderr


def test_an_interrupt_during_the_imports_has_its_code_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-c", "from paged_backend.cli import main; main()"]
    completed = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
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
    command = [sys.executable, "-c", script]
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (completed.returncode, completed.stdout) == (130, "half a line")


@pytest.fixture
def served(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> list[Models]:
    """What `serve` would serve."""
    served: list[Models] = []

    def note(models: Models) -> None:
        served.append(models)
        asyncio.run(models.start())
        asyncio.run(models.close())

    monkeypatch.setattr(serve_module, "run", note)
    return served


def test_options_reach_the_server_and_the_engine(served: list[Models], fakes: Fakes, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one\n\n two \n")
    arguments = ("--port", "9", "--api-key", "zero", "--api-key-file", str(tmp_path / "keys"), "--cors-origin", "*")
    engine = ("--max-num-seqs", "3", "--no-enable-prefix-caching", "--speculative-config", '{"method": "ngram"}')
    names = ("--served-model-name", "a", "--served-model-name", "b")
    assert run("serve", "m", *arguments, *engine, *names).exit_code == 0
    (models,) = served
    settings = models.settings
    assert (settings.port, settings.api_keys, settings.cors_origins) == (9, ("zero", "one", "two"), ("*",))
    assert models.names == ["a", "b"]
    assert fakes.made == [
        ("m", {"max_num_seqs": 3, "enable_prefix_caching": False, "speculative_config": {"method": "ngram"}})
    ]


def test_a_file_of_options_counts_unless_the_command_line_says_otherwise(
    served: list[Models], fakes: Fakes, tmp_path: Path
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("model: m\nport: 9\nhost: 0.0.0.0\nserved-model-name: a\napi_key: [x, y]\nmax-num-seqs: 3\n")
    assert run("serve", "--config", str(config), "--port", "10").exit_code == 0
    (models,) = served
    settings = models.settings
    assert (settings.port, settings.host, settings.api_keys) == (10, "0.0.0.0", ("x", "y"))
    assert models.names == ["a"]
    assert fakes.made == [("m", {"max_num_seqs": 3})]


def test_a_file_of_options_may_say_what_is_not_wanted(served: list[Models], fakes: Fakes, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("model: m\nno-ui: true\nno-enable-prefix-caching: true\nno-enable-lora: false\n")
    assert run("serve", "--config", str(config)).exit_code == 0
    assert fakes.made == [("m", {"enable_prefix_caching": False, "enable_lora": True})]
    assert not served[0].settings.ui


def test_several_models_have_a_name_each(served: list[Models], fakes: Fakes) -> None:
    arguments = ("--model-idle-timeout", "60", "--served-model-name", "x", "y", "--api-key", "k", "l", "--port", "9")
    assert run("serve", "a", "b", *arguments).exit_code == 0
    (models,) = served
    assert models.names == ["x", "y"] and fakes.made == []
    assert (models.settings.api_keys, models.settings.model_idle_timeout) == (("k", "l"), 60)
    assert run("serve", "a", "b").exit_code == 0
    assert served[1].names == ["a", "b"]


def test_several_models_may_stand_in_a_file(served: list[Models], tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("model: [a, b]\nserved-model-name: [x, y]\n")
    assert run("serve", "--config", str(config)).exit_code == 0
    assert served[0].names == ["x", "y"]


# A value other than the default for each option of `serve`, as in a file.
SERVER_OPTIONS: dict[str, Any] = {
    "host": "0.0.0.0",
    "port": 9,
    "uds": "/tmp/socket",
    "served_model_name": ["x", "y"],
    "model_idle_timeout": 60.0,
    "api_key": ["k", "l"],
    "metrics_port": 10,
    "otlp_endpoint": "http://localhost:4318",
    "request_timeout": 5.0,
    "shutdown_timeout": 6.0,
    "max_body_bytes": 1000,
    "cors_origin": ["*"],
    "ui": False,
    "root_path": "/api",
    "log_level": "debug",
}
ENGINE_VALUES: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "max_model_len": 100,
    "kv_cache_memory": "1GiB",
    "gpu_memory_utilization": 0.5,
    "attention_backend": "torch",
    "enforce_eager": True,
    "async_scheduling": False,
    "block_size": 8,
    "swap_space": 0.0,
    "tensor_parallel_size": 2,
    "num_gpu_blocks_override": 50,
    "enable_prefix_caching": False,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 64,
    "max_num_queued_reqs": 5,
    "max_logprobs": 7,
    "speculative_config": {"method": "ngram"},
    "seed": 4,
    "trust_remote_code": True,
    "revision": "main",
    "chat_template": "{{ messages }}",
    "tool_call_parser": "hermes",
    "reasoning_parser": "qwen3",
    "generation_config": "none",
    "cache_dir": "/tmp/cache",
}
FILE_NAMES = {
    "served_model_name": "served_model_names",
    "api_key": "api_keys",
    "cors_origin": "cors_origins",
}
"""Options that settings have as lists."""


def test_every_option_may_stand_in_a_file(
    served: list[Models], fakes: Fakes, certificate: tuple[str, str], tmp_path: Path
) -> None:
    server_options = SERVER_OPTIONS | dict(zip(("ssl_certfile", "ssl_keyfile"), certificate, strict=True))
    (tmp_path / "keys").write_text("m")
    files = {"api_key_file": str(tmp_path / "keys"), "tokenizer": "other"}
    content = {"model": ["a"], **server_options, **ENGINE_VALUES, **files}
    options = set(inspect.signature(serve_module.serve).parameters) - set(ENGINE_OPTIONS)
    others = {"config", "debug", "lora_modules", "allow_lora_updating"}  # adapters have tests of their own
    assert options - others == set(content) - set(ENGINE_OPTIONS), "an option has no value here"
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(content))
    result = run("serve", "--config", str(config))
    assert result.exit_code == 0, result.output
    (models,), ((model, engine),) = served, fakes.made
    assert (model, engine) == ("a", ENGINE_VALUES)
    for name, value in server_options.items():
        found = getattr(models.settings, FILE_NAMES.get(name, name))
        assert found == (tuple(value) if isinstance(value, list) else value) or name == "api_key"
    assert models.settings.api_keys == ("k", "l", "m")


@pytest.mark.parametrize("names", [("x",), ("x", "y", "z"), ("x", "x")])
def test_names_that_do_not_go_with_the_models_are_refused(fakes: Fakes, names: tuple[str, ...]) -> None:
    assert "served_model_names" in failed(run("serve", "a", "b", "--served-model-name", *names))


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


def test_a_file_of_keys_that_is_no_text_is_refused(fakes: Fakes, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_bytes(b"\xff\xfe")
    assert "is not UTF-8" in failed(run("serve", "m", "--api-key-file", str(keys)))


@pytest.mark.parametrize(
    "arguments", ["serve", "serve m --prot 9", "sreve", "serve m --port x", "serve m --speculative-config x"]
)
def test_wrong_usage_has_a_code_of_its_own(arguments: str) -> None:
    failed(run(*arguments.split()), 2)


def test_chat_remembers_until_it_is_reset(fakes: Fakes) -> None:
    lines = ["hi", "/help", "/reset", "/nope", "", "again", "/system be brief", "/exit", "never"]
    result = run("chat", "m", "--system", "be kind", text="\n".join(lines) + "\n")
    assert result.exit_code == 0
    assert result.output.count("abcdefgh") == 2 and "tokens/s" in result.output
    assert "/nope is not known" in result.output and "never" not in result.output


def test_chat_ends_with_its_input(fakes: Fakes) -> None:
    assert run("chat", "m", text="hi\n").exit_code == 0


@pytest.mark.parametrize("model", ["m", "[/m]"])
def test_chat_shows_what_looks_like_markup(fakes: Fakes, model: str) -> None:
    fakes.template = "{{ raise_exception('no [/INST] here') }}"
    result = run("chat", model, text="hi\n")
    assert result.exit_code == 0 and "no [/INST] here" in result.output


def test_generate_keeps_the_order_of_the_prompts(fakes: Fakes, tmp_path: Path) -> None:
    fakes.script = []
    source, target, again = (tmp_path / name for name in ("prompts.txt", "results.txt", "again.txt"))
    source.write_bytes("\ufeffone\r\n\r\nthree\r\nvier \N{SLIGHTLY SMILING FACE}".encode())
    options = ("--max-tokens", "5", "--temperature", "0")
    assert run("generate", "m", "-i", str(source), "-o", str(target), *options).exit_code == 0
    lines = target.read_text().split("\n")
    assert len(lines) == 5 and lines[1] == "" == lines[4] and len(set(lines)) == 4
    source.write_text("three\none\n")
    assert run("generate", "m", "-i", str(source), "-o", str(again), *options).exit_code == 0
    assert again.read_text().split("\n")[:2] == [lines[2], lines[0]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.txt", "prompts.txt", "results.txt"]


def test_generate_reads_and_writes_json_lines(fakes: Fakes, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines: list[Any] = [
        "text",
        {"prompt": [104, 105], "max_tokens": 2},
        {"messages": [{"role": "user", "content": "hi"}]},
    ]
    bad: list[Any] = [{"prompt": "x", "temperature": 9}, {"nothing": 1}, {"prompt": "x", "n": 2}]
    source.write_text("\n".join(map(json.dumps, lines + bad)) + "\n{broken\n" + "[" * 100_000 + "\n")
    result = run("generate", "m", "-i", str(source), "-o", str(target), "--max-tokens", "4")
    assert "5 of 8 prompts failed" in failed(result, 3)
    results = [json.loads(line) for line in target.read_text().splitlines()]
    assert [entry.get("text") for entry in results] == ["abcd", "ab", "abcd", *[None] * 5]
    assert "temperature=9" in results[3]["error"]


def test_generate_overwrites_only_if_told_to(fakes: Fakes, tmp_path: Path) -> None:
    source, target = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text("one\n")
    target.write_text("precious")
    arguments = ("generate", "m", "-i", str(source), "-o", str(target), "--max-tokens", "4")
    assert "--overwrite" in failed(run(*arguments))
    assert target.read_text() == "precious"
    assert run(*arguments, "--overwrite").exit_code == 0
    assert target.read_text() == "abcd\n"


def test_generate_does_not_overwrite_its_input(fakes: Fakes, tmp_path: Path) -> None:
    source = tmp_path / "in.txt"
    source.write_text("one\n")
    complaint = failed(run("generate", "m", "-i", str(source), "-o", str(source), "--overwrite"))
    assert "is the input too" in complaint and source.read_text() == "one\n"


def test_generate_resumes_only_what_was_asked_for_alike(fakes: Fakes, tmp_path: Path) -> None:
    source, target = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text("one\ntwo\n")
    with JsonLines(tmp_path / "out.txt.partial") as journal:
        journal.append({"settings": {"model": "m", "chat": False, "max_tokens": 4}})
        journal.append({"index": 0, "line": "one", "text": "kept", "usage": {"completion_tokens": 1}})
        journal.append({"index": 1, "line": "tow", "text": "of another line", "usage": {"completion_tokens": 1}})
    arguments = ("generate", "m", "-i", str(source), "-o", str(target), "--max-tokens")
    assert "other settings" in failed(run(*arguments, "5"))
    assert run(*arguments, "4").exit_code == 0
    assert target.read_text() == "kept\nabcd\n"


def test_generate_asks_again_after_the_engine_died(fakes: Fakes, tmp_path: Path) -> None:
    source, target = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text("".join(f"prompt {number}\n" for number in range(20)))
    arguments = ("generate", "m", "-i", str(source), "-o", str(target), "--max-tokens", "4", "--max-num-seqs", "2")
    fakes.on_step = dying_after(20)
    died = run(*arguments)
    assert died.exit_code == 1 and "error: the engine died of SystemExit" in died.output
    assert not target.exists()
    before = (tmp_path / "out.txt.partial").read_text().splitlines()
    assert 1 < len(before) < 21 and "error" not in "".join(before)
    fakes.on_step = lambda output: None
    assert run(*arguments).exit_code == 0
    assert target.read_text() == "abcd\n" * 20


def test_generate_asks_again_for_what_failed(fakes: Fakes, tmp_path: Path) -> None:
    source, target = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text("one\n")
    with JsonLines(tmp_path / "out.txt.partial") as journal:
        journal.append({"settings": {"model": "m", "chat": False, "max_tokens": 4}})
        journal.append({"index": 0, "line": "one", "error": "bad luck", "usage": {"completion_tokens": 0}})
    assert run("generate", "m", "-i", str(source), "-o", str(target), "--max-tokens", "4").exit_code == 0
    assert target.read_text() == "abcd\n"


async def test_of_requests_that_fail_together_none_is_reported_late() -> None:
    late: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: late.append(context))

    async def fail(number: int) -> None:
        raise EngineDeadError("dead")

    with pytest.raises(EngineDeadError):
        async for _ in as_they_finish(range(4), fail, at_once=4):
            pass
    gc.collect()
    assert late == []


def dying_after(num_steps: int) -> Callable[[SchedulerOutput], None]:
    left = iter(range(num_steps))

    def step(output: SchedulerOutput) -> None:
        if next(left, None) is None:
            raise SystemExit("on purpose")

    return step


BATCH: list[tuple[str, str | None]] = [
    (json.dumps({"custom_id": "good", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hi"}}), None),
    ("", "nothing"),
    ("   ", "nothing"),
    ("{broken", "invalid_json"),
    ("[]", "invalid_line"),
    (json.dumps({"url": "/v1/completions", "body": {}}), "missing_custom_id"),
    (json.dumps({"custom_id": "1", "url": "/v1/completions"}), "missing_body"),
    (json.dumps({"custom_id": "2", "method": "GET", "url": "/v1/completions", "body": {}}), "invalid_method"),
    (json.dumps({"custom_id": "3", "url": "/v1/nope", "body": {}}), "invalid_url"),
    (json.dumps({"custom_id": "good", "url": "/v1/completions", "body": {"prompt": "hi"}}), "duplicate_custom_id"),
    (
        json.dumps({"custom_id": "4", "url": "/v1/completions", "body": {"prompt": "x", "stream": True}}),
        "invalid_stream",
    ),
    (json.dumps({"custom_id": "5", "url": "/v1/completions", "body": {"prompt": "x", "model": "other"}}), "404"),
    (json.dumps({"custom_id": "6", "url": "/v1/completions", "body": {"prompt": "x" * 5000}}), "400"),
    (json.dumps({"custom_id": "response", "url": "/v1/responses", "body": {"input": "hi"}}), None),
    (json.dumps({"custom_id": "7", "url": "/v1/completions", "body": {"prompt": "x", "nope": 1}}), "400"),
    (
        json.dumps(
            {
                "custom_id": "zwölf",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {"model": "m", "messages": [{"role": "user", "content": "hi"}], "n": 2},
            },
            ensure_ascii=False,
        ),
        None,
    ),
]


def test_a_batch_answers_every_line_once(fakes: Fakes, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(line for line, _ in BATCH).encode() + b"\r\n\xff\xfe")
    result = run("run-batch", "-i", str(source), "-o", str(target), "--model", "m")
    assert "12 lines failed" in failed(result, 3)
    records = [json.loads(line) for line in target.read_text().splitlines()]
    expected = [wrong for _, wrong in BATCH if wrong != "nothing"] + ["invalid_line"]
    assert sorted(map(outcome, records), key=str) == sorted(expected, key=str)
    by_id = {record["custom_id"]: record for record in records if outcome(record) is None}
    assert by_id["good"]["response"]["body"]["choices"][0]["text"] == "abcdefgh"
    assert by_id["response"]["response"]["body"]["output"][0]["content"][0]["text"] == "abcdefgh"
    assert len(by_id["zwölf"]["response"]["body"]["choices"]) == 2
    assert "zwölf" in target.read_text()
    errors = [json.loads(line) for line in (tmp_path / "out.jsonl.errors").read_text().splitlines()]
    assert errors == [record for record in records if outcome(record) is not None]


def test_a_batch_that_is_done_stays_as_it_is(fakes: Fakes, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(line for line, _ in BATCH))
    arguments = ("run-batch", "-i", str(source), "-o", str(target), "--model", "m")
    failed(run(*arguments), 3)
    before = target.read_text()
    failed(run(*arguments), 3)
    assert target.read_text() == before


def test_a_batch_goes_on_after_a_half_line(fakes: Fakes, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(f"{line}\n" for line in batch_lines(3)))
    done = json.dumps({"id": "x", "custom_id": "1", "response": {"status_code": 200, "body": {}}, "error": None})
    target.write_text(f'{done}\n{{"id": "y", "custom_id": "2", "resp')
    assert run("run-batch", "-i", str(source), "-o", str(target), "--model", "m").exit_code == 0
    records = [json.loads(line) for line in target.read_text().splitlines()]
    assert sorted(record["custom_id"] for record in records) == ["0", "1", "2"]
    assert next(record["id"] for record in records if record["custom_id"] == "1") == "x"
    assert not (tmp_path / "out.jsonl.errors").exists()


def test_ids_that_are_no_unicode_are_told_apart(fakes: Fakes, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    ids = ["\ud83d", "\ud83e", "?", "zwölf"]
    requests = [{"custom_id": custom_id, "url": "/v1/completions", "body": {"prompt": "hi"}} for custom_id in ids]
    bad = {"custom_id": "\ud83f", "url": "/v1/completions", "body": {"prompt": "x", "nope": 1}}
    source.write_text("".join(json.dumps(request) + "\n" for request in (*requests, bad)))
    arguments = ("run-batch", "-i", str(source), "-o", str(target), "--model", "m")
    for _ in range(2):
        failed(run(*arguments), 3)
        records = [json.loads(line) for line in target.read_text().splitlines()]
        assert sorted(record["custom_id"] for record in records) == sorted([*ids, "\ud83f"])
    assert "zwölf" in target.read_text()
    (error,) = (tmp_path / "out.jsonl.errors").read_text().splitlines()
    assert json.loads(error)["custom_id"] == "\ud83f"


def test_a_batch_is_never_too_much_for_its_own_queue(fakes: Fakes, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"prompt": ["a", "b", "c"], "n": 4, "max_tokens": 1}
    requests = [{"custom_id": str(index), "url": "/v1/completions", "body": body} for index in range(5)]
    source.write_text("".join(json.dumps(request) + "\n" for request in requests))
    arguments = ("run-batch", "-i", str(source), "-o", str(target), "--model", "m", "--max-num-queued-reqs", "2")
    assert run(*arguments).exit_code == 0


def test_an_empty_batch_is_done_at_once(fakes: Fakes, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").touch()
    assert (
        run("run-batch", "-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), "--model", "m").exit_code
        == 0
    )
    assert (tmp_path / "out.jsonl").read_text() == ""


def test_a_batch_does_not_overwrite_its_input(fakes: Fakes, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(BATCH[0][0])
    assert "is the input too" in failed(run("run-batch", "-i", str(source), "-o", str(source), "--model", "m"))
    assert source.read_text() == BATCH[0][0]


@pytest.fixture
def killed(tmp_path: Path) -> Iterator[Any]:
    """Runs a command, kills it once its journal has some lines, and runs it again to its end."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["tests", ".", "kernels"])}

    def start(*arguments: str, step_seconds: float) -> subprocess.Popen[bytes]:
        command = [sys.executable, "tests/server_process.py", str(step_seconds), *arguments]
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)

    def run_twice(journal: Path, num_lines: int, *arguments: str) -> list[bytes]:
        """The whole lines that were there at the kill."""
        first = start(*arguments, step_seconds=0.01)
        try:
            wait_until(lambda: journal.exists() and journal.read_bytes().count(b"\n") >= num_lines, 60)
        finally:
            first.send_signal(signal.SIGKILL)
            first.wait()
        before = journal.read_bytes().split(b"\n")[:-1]
        second = start(*arguments, step_seconds=0)
        try:
            assert second.wait(60) == 0
        finally:
            second.kill()
        return before

    yield run_twice


@pytest.mark.slow
def test_a_killed_batch_loses_nothing_and_does_nothing_twice(killed: Any, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(f"{line}\n" for line in batch_lines(200)))
    command = ("run-batch", "-i", str(source), "-o", str(target), "--model", "m", "--max-num-seqs", "4")
    before = killed(target, 20, *command)
    after = target.read_bytes().splitlines()
    assert len(before) < 200 and after[: len(before)] == before
    assert sorted(int(json.loads(line)["custom_id"]) for line in after) == list(range(200))


@pytest.mark.slow
def test_a_killed_generate_loses_nothing_and_does_nothing_twice(killed: Any, tmp_path: Path) -> None:
    source, target = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_text("".join(f"prompt {number}\n" for number in range(200)))
    command = ("generate", "m", "-i", str(source), "-o", str(target), "--max-tokens", "8", "--max-num-seqs", "4")
    before = killed(tmp_path / "out.jsonl.partial", 20, *command)
    after = [json.loads(line) for line in target.read_text().splitlines()]
    assert [entry["line"] for entry in after] == source.read_text().splitlines()
    kept = {entry["index"]: entry for entry in map(json.loads, before[1:])}
    assert 0 < len(kept) < 200
    assert all(after[index] == entry for index, entry in kept.items())


def batch_lines(number: int) -> list[str]:
    return [
        json.dumps(
            {"custom_id": str(index), "url": "/v1/completions", "body": {"prompt": f"p{index}", "max_tokens": 8}}
        )
        for index in range(number)
    ]


def outcome(record: dict[str, Any]) -> str | None:
    """None for an answer, else the code of the bad line or the status of the refusal."""
    if record["error"] is not None:
        assert record["response"] is None
        return str(record["error"]["code"])
    status = record["response"]["status_code"]
    return None if status == 200 else str(status)
