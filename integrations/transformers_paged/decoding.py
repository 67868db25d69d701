"""The rows of a `generate` call through the engine, to the tensors that transformers' own loop would return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from paged_backend import LLM, EngineError, RequestHandle, SamplingParams
from transformers_paged.call import Call
from transformers_paged.rows import Row

Prompts = list[dict[str, list[int]]]


def decode(llm: LLM, call: Call, params: Sequence[SamplingParams], rows: Sequence[Row]) -> Any:
    """Ids [rows, L + T], or a GenerateDecoderOnlyOutput. An error in a logits processor is raised as it was."""
    prompts = [{"prompt_token_ids": call.token_ids(call.prompt_of(row))} for row in range(call.num_rows)]
    try:
        if call.criteria or call.streamer is not None:
            token_ids = _Lockstep(call, rows).run(llm, prompts, params)
        else:
            outputs = llm.generate(prompts, list(params), use_tqdm=False)
            token_ids = [output.outputs[0].token_ids for output in outputs]
    except EngineError:
        for row in rows:
            if row.error is not None:
                raise row.error from None
        raise
    return _output(call, token_ids, rows)


class _Lockstep:
    """Reads all rows token by token, as transformers' loop makes them, for its stopping criteria and its streamer.

    The engine may be ahead of the reader: what it made after a row's end is dropped, and its request aborted.
    """

    def __init__(self, call: Call, rows: Sequence[Row]) -> None:
        self._call = call
        self._rows = rows
        self._input_ids = call.input_ids
        self._token_ids: list[list[int]] = [[] for _ in range(call.num_rows)]
        self._scores: tuple[Tensor, ...] | None = () if call.captures("output_scores") else None
        self._is_unfinished = [True] * call.num_rows

    def run(self, llm: LLM, prompts: Prompts, params: Sequence[SamplingParams]) -> list[list[int]]:
        handles: list[RequestHandle] = []
        try:
            for prompt, one in zip(prompts, params, strict=True):
                handles.append(llm.submit(prompt, one))
            readers = [_Reader(handle) for handle in handles]
            while any(self._is_unfinished):
                self._step(readers)
        finally:
            for handle in handles:
                handle.close()
        return self._token_ids

    def _step(self, readers: Sequence[_Reader]) -> None:
        call, pads = self._call, self._call.pads_finished_rows
        reading = [is_unfinished or not pads for is_unfinished in self._is_unfinished]
        tokens = [call.pad_token_id] * len(reading)
        for row in (row for row, is_read in enumerate(reading) if is_read):
            tokens[row] = next(readers[row])
            self._token_ids[row].append(tokens[row])
        new_ids = torch.tensor(tokens, device=self._input_ids.device)
        self._input_ids = torch.cat([self._input_ids, new_ids[:, None]], dim=1)
        self._end_rows(tokens)
        if call.streamer is not None:
            call.streamer.put(new_ids.cpu())
        for row, is_unfinished in enumerate(self._is_unfinished):
            if not is_unfinished and pads:
                readers[row].close()

    def _end_rows(self, tokens: list[int]) -> None:
        call, num_new = self._call, len(max(self._token_ids, key=len))
        if self._scores is not None:
            self._scores += (_stacked(self._rows, "scores", num_new - 1),)
        stops = call.criteria(self._input_ids, self._scores).tolist()
        for row, (token, stop) in enumerate(zip(tokens, stops, strict=True)):
            if stop or token in call.eos_token_ids or num_new >= call.max_new_tokens:
                self._is_unfinished[row] = False


class _Reader:
    """The tokens of one request, one by one."""

    def __init__(self, handle: RequestHandle) -> None:
        self._handle = handle
        self._token_ids: list[int] = []

    def __next__(self) -> int:
        while not self._token_ids:
            self._token_ids = next(self._handle).outputs[0].token_ids[::-1]
        return self._token_ids.pop()

    def close(self) -> None:
        self._handle.close()


def _output(call: Call, token_ids: list[list[int]], rows: Sequence[Row]) -> Any:
    num_new = max(map(len, token_ids))
    padded = [ids + [call.pad_token_id] * (num_new - len(ids)) for ids in token_ids]
    new_ids = torch.tensor(padded, dtype=torch.long, device=call.prompts.device)
    sequences = torch.cat([call.input_ids.long(), new_ids], dim=1)
    if not call.config.return_dict_in_generate:
        return sequences
    captured = {
        name: tuple(_stacked(rows, name, step) for step in range(num_new))
        for name in ("scores", "logits")
        if call.captures(f"output_{name}")
    }
    return GenerateDecoderOnlyOutput(sequences=sequences, **captured)


def _stacked(rows: Sequence[Row], name: str, step: int) -> Tensor:
    """[rows, V] of one step, with zeros for rows that had ended before."""
    kept: list[Tensor | None] = [getattr(row, name).get(step) for row in rows]
    some = next(tensor for tensor in kept if tensor is not None)
    return torch.stack([torch.zeros_like(some) if tensor is None else tensor for tensor in kept])
