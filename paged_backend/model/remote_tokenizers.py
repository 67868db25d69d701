"""Qwen 1's tokenizer, made of its vocabulary file, without the code that came with it."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from tokenizers import normalizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.utils import cached_file

from paged_backend.errors import MissingExtraError

_FILE = "qwen.tiktoken"
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_SPECIAL_TOKENS = [END_OF_TEXT, IM_START, IM_END, *(f"<|extra_{i}|>" for i in range(205))]
_CHAT_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""What its code makes of a chat."""


def qwen_tokenizer(source: str, options: Mapping[str, Any]) -> PreTrainedTokenizerFast | None:
    """None for checkpoints without its vocabulary file."""
    where = {name: value for name, value in options.items() if name != "trust_remote_code"}
    quietly = {
        f"_raise_exceptions_for_{what}": False for what in ("missing_entries", "connection_errors", "gated_repo")
    }
    path = cached_file(source, _FILE, **where, **quietly)
    if path is None:
        return None
    if importlib.util.find_spec("tiktoken") is None:
        raise MissingExtraError(f"the tokenizer of {source!r}", "qwen")
    backend = TikTokenConverter(path, pattern=_PATTERN, extra_special_tokens=_SPECIAL_TOKENS).converted()
    backend.normalizer = normalizers.NFC()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        additional_special_tokens=_SPECIAL_TOKENS[1:],
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
