"""Parsers of tool calls, one module per family of formats, by the names that vLLM gives them."""

from __future__ import annotations

from paged_backend.chat.tool_parsers.base import ToolParser
from paged_backend.chat.tool_parsers.deepseek import DeepSeekV3Parser, DeepSeekV31Parser
from paged_backend.chat.tool_parsers.gemma_fields import FunctionGemmaParser, Gemma4Parser
from paged_backend.chat.tool_parsers.harmony import HarmonyParser
from paged_backend.chat.tool_parsers.hermes import HermesParser
from paged_backend.chat.tool_parsers.json_calls import GraniteParser, JsonParser, Llama3JsonParser, Phi4MiniParser
from paged_backend.chat.tool_parsers.mistral import MistralArgsParser, MistralParser
from paged_backend.chat.tool_parsers.pythonic import GemmaParser, PythonicParser
from paged_backend.chat.tool_parsers.qwen3_coder import Qwen3CoderParser

TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "qwen3_coder": Qwen3CoderParser,
    "qwen3_xml": Qwen3CoderParser,
    "llama3_json": Llama3JsonParser,
    "llama4_json": Llama3JsonParser,
    "pythonic": PythonicParser,
    "llama4_pythonic": PythonicParser,
    "mistral": MistralParser,
    "mistral_args": MistralArgsParser,
    "deepseek_v3": DeepSeekV3Parser,
    "deepseek_v31": DeepSeekV31Parser,
    "openai": HarmonyParser,
    "gemma": GemmaParser,
    "functiongemma": FunctionGemmaParser,
    "gemma4": Gemma4Parser,
    "granite": GraniteParser,
    "phi4_mini_json": Phi4MiniParser,
    "json": JsonParser,
}


def detect_tool_parser(template: str) -> str | None:
    """The family whose markup a chat template writes; None if it writes none that is known."""
    for name, texts in _SIGNS:
        if all(text in template for text in texts):
            return name
    return None


_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("openai", ("<|channel|>", "<|message|>")),
    ("mistral_args", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ("functiongemma", ("<start_function_call>",)),
    ("gemma4", ("<|tool_call>call:",)),
    ("granite", ("<|tool_call|>",)),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("hermes", ("<tool_call>",)),
    ("gemma", ("```tool_code",)),
    ("pythonic", ("<|python_start|>",)),
    ("pythonic", ("func_name1(",)),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ("<|start_header_id|>", '"parameters"')),
    ("phi4_mini_json", ("functools",)),
)
