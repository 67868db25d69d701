"""What the commands share: the engine's options, a file of options, errors as one sentence."""

from __future__ import annotations

import difflib
import functools
import inspect
import json
import logging
import sys
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
import yaml
from typer.core import TyperCommand

from paged_backend import EngineConfig, PagedBackendError
from paged_backend.cli import INTERRUPTED

FAILED, INCOMPLETE = 1, 3

_ENGINE = "Engine"


class _Option(NamedTuple):
    kind: Any
    help: str
    flags: tuple[str, ...] = ()
    parser: Callable[[Any], Any] | None = None


def _mapping(value: Any) -> dict[str, Any]:
    """Of JSON on the command line, or as it is in a file of options."""
    try:
        content = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise typer.BadParameter(f"{value!r} is no JSON object")
    return content


ENGINE_OPTIONS: Mapping[str, _Option] = {
    "tokenizer": _Option(str, "Folder or hub id of another tokenizer than the model's own."),
    "dtype": _Option(str, "auto, float32, bfloat16 or float16."),
    "quantization": _Option(
        str,
        "int8 or int4: round the weights of linear layers when they are loaded, on a CPU; unpacked: have those of a "
        "quantised checkpoint in dtype.",
    ),
    "device": _Option(str, "auto, cpu, cuda or mps."),
    "max_model_len": _Option(int, "Most tokens of a prompt and its output together."),
    "kv_cache_memory": _Option(str, "Memory of the KV cache, as 2GiB or in bytes."),
    "kv_cache_dtype": _Option(str, "auto: the model's dtype; int8: half the memory; on GPUs also fp8."),
    "attention_backend": _Option(str, "Whose kernels attend: auto, triton, flashinfer, flash_attn, cpu or torch."),
    "gpu_memory_utilization": _Option(float, "Share of the free memory for the KV cache, if its memory is not given."),
    "block_size": _Option(int, "Tokens per block."),
    "swap_space": _Option(float, "GiB of host memory for preempted requests; 0: they are recomputed."),
    "tensor_parallel_size": _Option(int, "Ranks, processes with a device each, that a model is cut into."),
    "num_gpu_blocks_override": _Option(int, "Number of blocks, whatever the memory."),
    "enable_prefix_caching": _Option(
        bool,
        "Keep the blocks of finished requests findable.",
        ("--enable-prefix-caching/--no-enable-prefix-caching",),
    ),
    "max_num_seqs": _Option(int, "Most sequences in one step."),
    "max_num_batched_tokens": _Option(int, "Most tokens computed in one step."),
    "max_num_queued_reqs": _Option(int, "Most requests waiting for their first step."),
    "max_logprobs": _Option(int, "Most log-probabilities per token that a request may ask for; -1: no limit."),
    "speculative_config": _Option(
        dict, 'Guess coming tokens and check them at once, as \'{"method": "ngram"}\'.', parser=_mapping
    ),
    "enforce_eager": _Option(bool, "Capture no CUDA graphs.", ("--enforce-eager/--no-enforce-eager",)),
    "async_scheduling": _Option(
        bool,
        "Schedule a step while the one before runs; the default is to do so on CUDA devices.",
        ("--async-scheduling/--no-async-scheduling",),
    ),
    "enable_lora": _Option(bool, "Take requests for LoRA adapters.", ("--enable-lora/--no-enable-lora",)),
    "max_loras": _Option(int, "Most different LoRA adapters in one step."),
    "max_lora_rank": _Option(int, "Largest rank of a LoRA adapter."),
    "max_cpu_loras": _Option(int, "Most LoRA adapters that are kept loaded."),
    "seed": _Option(int, "Where requests without a seed draw theirs from."),
    "trust_remote_code": _Option(
        bool, "Run Python code that comes with a checkpoint.", ("--trust-remote-code/--no-trust-remote-code",)
    ),
    "revision": _Option(str, "Branch, tag or commit of a hub repository."),
    "chat_template": _Option(str, "A Jinja template, or a path to one, instead of the tokenizer's own."),
    "tool_call_parser": _Option(str, "How the model writes tool calls: a format, or auto."),
    "reasoning_parser": _Option(str, "How the model writes its reasoning: a format, or auto."),
    "generation_config": _Option(str, "auto: take sampling defaults from the model; none: do not."),
    "cache_dir": _Option(str, "Where converted models are kept."),
}

Engine = dict[str, Any]
"""Arguments of `LLM`: those that were given."""


def command(function: Callable[..., None]) -> Callable[..., None]:
    """A command whose argument `engine` becomes the engine's options, and whose errors are one sentence.

    Every option may also stand in the YAML file that `--config` names.
    """
    own = inspect.signature(function, eval_str=True).parameters.values()
    shared = [_engine_parameter(name, option) for name, option in ENGINE_OPTIONS.items()]
    parameters = [*(parameter for parameter in own if parameter.name != "engine"), *shared, _CONFIG, _DEBUG]

    @functools.wraps(function)
    def run(*args: Any, config: Path | None, debug: bool, **options: Any) -> None:
        engine = {name: options.pop(name) for name in ENGINE_OPTIONS}
        given = {name: value for name, value in engine.items() if value is not None}
        _reporting_errors(debug, functools.partial(function, *args, **options, engine=given))

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


class Command(TyperCommand):
    """A command whose help has a section for each panel, and all names in full, however narrow the terminal is."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
        for param in self.get_params(ctx):
            is_argument = param.param_type_name == "argument"
            panel = getattr(param, "rich_help_panel", None) or ("Arguments" if is_argument else "Options")
            if record := param.get_help_record(ctx):
                sections[panel].append(record)
        for panel, records in sections.items():
            with formatter.section(panel):
                formatter.write_dl(records)


class ManyValuesCommand(Command):
    """A command whose repeatable options take several values at once, as in vLLM, if the models stand before them:
    `serve A B --served-model-name a b`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0].startswith("-"):
            return super().parse_args(ctx, args)
        flags = {flag for option in self.params if getattr(option, "multiple", False) for flag in option.opts}
        return super().parse_args(ctx, list(_repeated(args, flags)))


def _repeated(args: Iterable[str], flags: Container[str]) -> Iterator[str]:
    """With the flag before each of its values."""
    flag, has_value = None, False
    for arg in args:
        if arg.startswith("-"):
            flag, has_value = (arg if arg in flags else None), False
        elif flag is not None and has_value:
            yield flag
        else:
            has_value = True
        yield arg


def start_logging(level: str) -> None:
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr, force=True
    )
    for name in ("httpx", "urllib3", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _reporting_errors(debug: bool, run: Callable[[], None]) -> None:
    try:
        run()
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except (PagedBackendError, OSError, yaml.YAMLError) as error:
        if debug:
            raise
        typer.secho(f"error: {' '.join(str(error).split())}", fg="red", err=True)
        raise typer.Exit(FAILED) from None


def _engine_parameter(name: str, option: _Option) -> inspect.Parameter:
    default = next((field for field in _config_defaults() if field[0] == name), (name, None))[1]
    flags = option.flags or (f"--{name.replace('_', '-')}",)
    shown = typer.Option(
        *flags,
        help=option.help,
        rich_help_panel=_ENGINE,
        parser=option.parser,
        metavar="JSON" if option.parser else None,
        show_default=False if default is None else str(default),
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[option.kind | None, shown]
    )


@functools.cache
def _config_defaults() -> list[tuple[str, Any]]:
    return [(name, parameter.default) for name, parameter in inspect.signature(EngineConfig).parameters.items()]


def _take_config(context: typer.Context, path: Path | None) -> Path | None:
    """Make what the file says the defaults of this command's options."""
    if path is not None:
        context.default_map = {**(context.default_map or {}), **_read_config(context, path)}
    return path


def _name_of(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def _read_config(context: typer.Context, path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise typer.BadParameter(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise typer.BadParameter(f"{path} must map options to values")
    parameters = {str(parameter.name): parameter for parameter in context.command.params}
    opposites = {
        _name_of(flag): parameter
        for parameter in parameters.values()
        for flag in getattr(parameter, "secondary_opts", ())
    }
    result = {}
    for key, value in content.items():
        name = _name_of(str(key))
        if name in opposites and isinstance(value, bool):
            name, value = str(opposites[name].name), not value
        if name not in parameters:
            nearest = difflib.get_close_matches(name, parameters, n=1)
            hint = f"; did you mean {nearest[0].replace('_', '-')!r}?" if nearest else ""
            raise typer.BadParameter(f"{path} has {key!r}, which is no option of this command{hint}")
        takes_many = getattr(parameters[name], "multiple", False) or parameters[name].nargs == -1
        result[name] = [value] if takes_many and not isinstance(value, list) else value
    return result


_CONFIG = inspect.Parameter(
    "config",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        Path | None,
        typer.Option(
            "--config",
            callback=_take_config,
            is_eager=True,
            metavar="FILE",
            help="A YAML file with options; those on the command line win.",
        ),
    ],
)
_DEBUG = inspect.Parameter(
    "debug",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")],
)
