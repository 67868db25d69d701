"""llama.cpp's library, driven batch by batch as its own server and `llama-batched-bench` drive it.

Its server would make it look slower: it samples with candidate lists of the whole vocabulary, and computes a beginning
anew for each of the requests that arrive together. Here the next tokens are an argmax over all rows of logits at once,
a beginning that all prompts share is computed once, what a sequence's slot holds from the call before is kept as far as
it fits, as the server does, and no text is made of the tokens.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

import protocol

FILE_TYPES = {"bf16": llama_cpp.LLAMA_FTYPE_MOSTLY_BF16, "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0}
SETTINGS = {"n_batch": 2048, "n_ubatch": 2048, "flash_attn_type": llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED}
MOST_NEW_TOKENS = 128
SILENT = llama_cpp.llama_log_callback(lambda level, text, user_data: None)
SHORTEST_SHARED_PREFIX = 128
"""From here on a unified KV cache, which can share, is worth being slower than one stream for each sequence."""


def convert(gguf: Path, precision: str, converted: Path) -> None:
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = FILE_TYPES[precision]
    params.allow_requantize = True
    failed = llama_cpp.llama_model_quantize(os.fsencode(gguf), os.fsencode(converted), ctypes.byref(params))
    assert not failed


def common_prefix(prompts: list[list[int]]) -> list[int]:
    columns = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*prompts, strict=False))
    return [column[0] for column in columns]


class Slots:
    """A context with room for `num_sequences` of `num_positions` tokens each, and what each of them holds."""

    def __init__(self, model: Any, num_sequences: int, num_positions: int, is_unified: bool, threads: int) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = num_sequences * num_positions, num_sequences
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = is_unified
        for name, value in SETTINGS.items():
            setattr(params, name, value)
        self._context = llama_cpp.llama_init_from_model(model, params)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(SETTINGS["n_batch"], 0, 1)
        self._num_words = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._held: list[list[int]] = [[] for _ in range(num_sequences)]

    def keep_what_fits(self, prompts: list[list[int]]) -> None:
        for sequence, prompt in enumerate(prompts):
            held = len(common_prefix([self._held[sequence], prompt[:-1]]))
            llama_cpp.llama_memory_seq_rm(self._memory, sequence, held, -1)
            self._held[sequence] = prompt[:held]

    def share(self, prefix: list[int], num_sequences: int) -> None:
        """Computes `prefix` once, for all of them."""
        llama_cpp.llama_memory_clear(self._memory, True)
        self._held = [[] for _ in self._held]
        self.feed([(0, token) for token in prefix])
        for sequence in range(1, num_sequences):
            llama_cpp.llama_memory_seq_cp(self._memory, 0, sequence, -1, -1)
            self._held[sequence] = list(prefix)

    def missing(self, prompts: list[list[int]]) -> list[tuple[int, int]]:
        """(sequence, token) of all that is not computed yet."""
        return [
            (sequence, token)
            for sequence, prompt in enumerate(prompts)
            for token in prompt[len(self._held[sequence]) :]
        ]

    def feed(self, tokens: list[tuple[int, int]]) -> dict[int, int]:
        """Computes (sequence, token)s; the best next token of each sequence."""
        next_tokens: dict[int, int] = {}
        last = {sequence: index for index, (sequence, _) in enumerate(tokens)}
        for start in range(0, len(tokens), SETTINGS["n_batch"]):
            piece = tokens[start : start + SETTINGS["n_batch"]]
            asked = [sequence for index, (sequence, _) in enumerate(piece, start) if last[sequence] == index]
            for index, (sequence, token) in enumerate(piece):
                self._put(index, sequence, token, is_asked=last[sequence] == start + index)
            self._batch.n_tokens = len(piece)
            assert llama_cpp.llama_decode(self._context, self._batch) == 0
            if asked:
                logits = llama_cpp.llama_get_logits(self._context)
                rows = np.ctypeslib.as_array(logits, shape=(len(asked), self._num_words))
                next_tokens |= zip(asked, rows.argmax(axis=1).tolist(), strict=True)
        return next_tokens

    def _put(self, index: int, sequence: int, token: int, is_asked: bool) -> None:
        batch, held = self._batch, self._held[sequence]
        batch.token[index], batch.pos[index], batch.logits[index] = token, len(held), is_asked
        batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
        held.append(token)


def load(gguf: Path, precision: str, threads: int, options: dict[str, Any]) -> protocol.Engine:
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(os.fsencode(gguf), llama_cpp.llama_model_default_params())
    vocabulary = llama_cpp.llama_model_get_vocab(model)
    template = llama_cpp.llama_model_chat_template(model, None).decode()
    formatter = Jinja2ChatFormatter(template, eos_token="", bos_token="")
    slots: dict[tuple[int, int, bool], Slots] = {}

    def tokenized(conversation: protocol.Conversation) -> list[int]:
        text = formatter(messages=conversation).prompt.encode()
        tokens = (llama_cpp.llama_token * len(text))()
        num_tokens = llama_cpp.llama_tokenize(vocabulary, text, len(text), tokens, len(text), False, True)
        return tokens[:num_tokens]

    def slots_for(prompts: list[list[int]], is_unified: bool) -> Slots:
        num_positions = max(map(len, prompts)) + MOST_NEW_TOKENS
        key = (len(prompts), -(-num_positions // 512) * 512, is_unified)
        if key not in slots:
            slots[key] = Slots(model, *key, threads)
        return slots[key]

    def generate(conversations: list[protocol.Conversation], num_tokens: int) -> protocol.Counts:
        assert num_tokens <= MOST_NEW_TOKENS
        prompts = [tokenized(conversation) for conversation in conversations]
        shared = common_prefix(prompts) if len(prompts) > 1 else []
        is_unified = len(shared) >= SHORTEST_SHARED_PREFIX
        ours = slots_for(prompts, is_unified)
        if is_unified:
            ours.share(shared, len(prompts))
        else:
            ours.keep_what_fits(prompts)
        newest = ours.feed(ours.missing(prompts))
        for _ in range(num_tokens - 1):
            newest = ours.feed(list(newest.items()))
        return sum(map(len, prompts)), len(newest) * num_tokens

    return protocol.Engine(generate, SETTINGS | {"n_threads": threads})


if __name__ == "__main__":
    llama_cpp.llama_log_set(SILENT, None)
    protocol.serve("llama-cpp-python", load, convert)
